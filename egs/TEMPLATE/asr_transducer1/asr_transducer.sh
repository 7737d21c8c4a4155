#!/usr/bin/env bash
# The stages of a recipe for a transducer, with ESPnet2's command lines: from the data
# to a table of error rates. A recipe's run.sh calls this with what is its own.
set -euo pipefail

{ # bash reads this group to its end first: an edit meanwhile does not reach a run

usage() {
    cat <<USAGE
Usage: ./run.sh [options]

Trains and decodes a transducer on $title, through ESPnet's own command lines.

Stages (finished ones are not run again, an interrupted training goes on):
  0  check of the installation (always)
  1  data          2  tokens        3  statistics
  4  training      5  decoding      6  pictures and table
The configurations are checked before the first of stages 3 to 5 that is to be run.

Options:
  --stage N             first stage to run (default 1)
  --stop_stage N        last stage to run (default 6)
  --archive FILE        a local copy of the corpus: $archives
  --train_config FILE   (default $train_config)
  --decode_configs "FILE ..."
                        (default ${decode_configs[*]})
  --inference_asr_model FILE
                        checkpoint that is decoded with (default $inference_asr_model)
  --token_type TYPE     char, word or bpe (default $token_type)
  --nbpe N              number of BPE units (default $nbpe)
  --seed N              instead of the training configuration's
  --datadir DIR         (default $datadir)
  --expdir DIR          (default exp/${fold:+$fold/}<name of train_config>[_seed<N>]_espnet<version>)
  --python FILE         the Python that has ESPnet (default python3)
  --stream_seconds N    decode so long a stream of the last decode set too, with each
                        decode config for streaming; latency and memory are measured
  --max_train_wer X     fail where the WER on the training set ends above X %
  --pack FILE           after stage 6, pack the model for other machines: FILE.zip or
                        FILE.tar.gz, for ESPnet's unpack and from_pretrained
  --help

A recipe's own, which its run.sh gives first:
  --recipe DIR          its folder, with local/prepare.py
  --title NAME          the corpus
  --archives TEXT       what --archive takes, and what is taken without it
  --train_set NAME      folder below datadir
  --valid_set NAME      (likewise)
  --decode_sets "NAME ..."
                        (likewise)
  --prepare_options "OPTION ..."
                        for local/prepare.py
  --fold NAME           one of several divisions of the corpus, which prepare_options
                        choose, and run.sh's options of the same names: folder below
                        datadir, and below exp
  --time TEXT           how long all stages take
  --note TEXT           what the table's reader should know
  --list_utterances     add every utterance to the table
USAGE
}

die() {
    echo "run.sh: error: $*" >&2
    exit 1
}

absolute() {
    case $1 in
    /*) echo "$1" ;;
    *) echo "$caller_dir/$1" ;;
    esac
}

caller_dir=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
template=$(cd .. && pwd)

stage=1
stop_stage=6
archive=
train_config=
decode_configs=()
inference_asr_model=latest.pth
token_type=char
nbpe=100
seed=
datadir=
expdir=
python=python3
stream_seconds=
max_train_wer=
pack=
recipe=
title=
archives=
train_set=train
valid_set=valid
decode_sets=
prepare_options=
fold=
time=
note=
list_utterances=false
help=false

while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        help=true
        shift
        continue
        ;;
    --list_utterances)
        list_utterances=true
        shift
        continue
        ;;
    --stage | --stop_stage | --archive | --train_config | --decode_configs | \
        --inference_asr_model | --token_type | --nbpe | --seed | --datadir | --expdir | \
        --python | --stream_seconds | --max_train_wer | --pack | --recipe | --title | \
        --archives | --train_set | --valid_set | --decode_sets | --prepare_options | \
        --fold | --time | --note)
        [ $# -ge 2 ] || die "option $1 needs a value"
        ;;
    *) die "unknown option '$1' (--help lists the options)" ;;
    esac
    case $1 in
    --stage) stage=$2 ;;
    --stop_stage) stop_stage=$2 ;;
    --archive) archive=$(absolute "$2") ;;
    --train_config) train_config=$(absolute "$2") ;;
    --decode_configs)
        decode_configs=()
        for config in $2; do decode_configs+=("$(absolute "$config")"); done
        ;;
    --inference_asr_model) inference_asr_model=$2 ;;
    --token_type) token_type=$2 ;;
    --nbpe) nbpe=$2 ;;
    --seed) seed=$2 ;;
    --datadir) datadir=$(absolute "$2") ;;
    --expdir) expdir=$(absolute "$2") ;;
    --python)
        case $2 in
        */*) python=$(absolute "$2") ;;
        *) python=$2 ;;
        esac
        ;;
    --stream_seconds) stream_seconds=$2 ;;
    --max_train_wer) max_train_wer=$2 ;;
    --pack) pack=$(absolute "$2") ;;
    --recipe) recipe=$(absolute "$2") ;;
    --title) title=$2 ;;
    --archives) archives=$2 ;;
    --train_set) train_set=$2 ;;
    --valid_set) valid_set=$2 ;;
    --decode_sets) decode_sets=$2 ;;
    --prepare_options) prepare_options=$2 ;;
    --fold) fold=$2 ;;
    --time) time=$2 ;;
    --note) note=$2 ;;
    esac
    shift 2
done
[ -n "$recipe" ] || die "no --recipe: use the run.sh of a recipe"
datadir=${datadir:-$recipe/data}
if $help; then
    usage
    exit 0
fi
for number in "$stage" "$stop_stage"; do
    case $number in
    [0-6]) ;;
    *) die "a stage is a number from 0 to 6, not '$number'" ;;
    esac
done
for number in "$nbpe" "${seed:-0}" "${stream_seconds:-0}"; do
    case $number in
    *[!0-9]* | "") die "a whole number is needed, not '$number'" ;;
    esac
done
case " $decode_sets " in
*" $train_set "*) ;;
*) [ -z "$max_train_wer" ] || die "--max_train_wer: $train_set is not decoded" ;;
esac
case $token_type in
char | word | bpe) ;;
*) die "--token_type is char, word or bpe, not '$token_type'" ;;
esac
[ ${#decode_configs[@]} -gt 0 ] || die "--decode_configs names no file"
for file in "$train_config" "${decode_configs[@]}" ${archive:+"$archive"}; do
    [ -f "$file" ] || die "no such file: $file"
done
command -v "$python" >/dev/null || die "no such Python: $python"
if [ -z "$expdir" ]; then
    find_version='from importlib.metadata import version; print(version("espnet"))'
    version=$("$python" -c "$find_version" 2>/dev/null) || version=
    name=$(basename "${train_config%.*}")${seed:+_seed$seed}
    expdir=$recipe/exp/${fold:+$fold/}${name}_espnet$version
fi
datadir+=${fold:+/$fold}
case $pack in
"" | *.zip | *.tar | *.tar.gz | *.tgz) ;;
*) die "--pack: a packed model ends in .zip, .tar, .tar.gz or .tgz, not '$pack'" ;;
esac
case $datadir$expdir in
*,*) die "ESPnet cannot take a comma in --datadir or --expdir" ;;
esac
cd "$recipe"

# with a small model and small batches, further threads only wait for each other
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MPLBACKEND=Agg
export PYTHONPATH=$template${PYTHONPATH:+:$PYTHONPATH}

# Every child runs in the background, so that a signal reaches this shell, and
# through it the child, at once.
child=
interrupted() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
        # in a trap, a wait can end at once, for the signal that led there
        until wait 2>/dev/null; do :; done
    fi
    echo "run.sh: interrupted; the same command goes on from here" >&2
    exit "$1"
}
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
trap 'interrupted 129' HUP

run() {
    local status=0
    "$@" &
    child=$!
    wait "$child" || status=$?
    child=
    return $status
}

# logged LOG [recipe.job's options] -- COMMAND...: output to a file, progress to the screen
logged() {
    local log=$1
    shift
    run "$python" -m recipe.job --log "$log" "$@"
}

# if begin NUMBER TITLE STAMP DEPENDENCIES; then ...; finish [--content FILE] OUTPUTS; fi
# A stage is run if it was asked for and its stamp does not show that it was finished
# with the same dependencies, its outputs unchanged since.
begin() {
    local number=$1 title=$2 status=0
    stamp=$3
    shift 3
    dependencies=("$@")
    [ "$stage" -le "$number" ] && [ "$number" -le "$stop_stage" ] || return 1
    run "$python" -m recipe.stamp finished "$stamp" "${dependencies[@]}" || status=$?
    case $status in
    0)
        echo "Stage $number: $title: finished earlier"
        return 1
        ;;
    3)
        echo "Stage $number: $title"
        SECONDS=0
        ;;
    *) exit "$status" ;;
    esac
}

finish() {
    run "$python" -m recipe.stamp record "$stamp" "${dependencies[@]}" "$@"
    echo "  done in $SECONDS s"
}

stats=$expdir/stats
train=$expdir/train
model=$train/$inference_asr_model
IFS=' ' read -r -a decode_sets <<<"$decode_sets"
sets=$(printf '%s\n' "$train_set" "$valid_set" "${decode_sets[@]}" | sort -u)

[ -z "$time" ] || echo "$title: all stages together take $time"
echo "Stage 0: checks"
run "$python" -m recipe.check

# Data that an earlier version of the recipe prepared are not those of this one.
preparation=()
for file in local/*.py ../local/*.py; do
    [ ! -f "$file" ] || preparation+=("$file")
done
content=$datadir/.stamps/content # of the audio or features, which lists only name
IFS=' ' read -r -a prepare_words <<<"$prepare_options"
if begin 1 "data" "$datadir/.stamps/data" --input "${preparation[@]}" ${archive:+"$archive"} \
    ${prepare_options:+--setting "prepare_options=$prepare_options"}; then
    run "$python" local/prepare.py --datadir "$datadir" ${archive:+--archive "$archive"} \
        "${prepare_words[@]}"
    outputs=()
    for set in $sets; do
        for file in wav.scp feats.scp feats_dim text utt2dur; do
            [ ! -f "$datadir/$set/$file" ] || outputs+=("$datadir/$set/$file")
        done
    done
    # and what the lists name
    while read -r file; do outputs+=("$file"); done \
        < <(cat "$datadir"/*/{wav,feats}.scp 2>/dev/null | cut -d " " -f 2- | sort -u)
    finish --content "$content" --output "${outputs[@]}"
fi

# Features that were made beforehand need no front-end, only their size.
scp=wav.scp type=sound input_options=()
if [ -f "$datadir/$train_set/feats.scp" ]; then
    scp=feats.scp type=npy input_options=(--input_size "$(cat "$datadir/$train_set/feats_dim")")
fi

token_dir=$datadir/token_list/$token_type
[ "$token_type" != bpe ] || token_dir+=$nbpe
tokens=$token_dir/tokens.txt
token_options=(--token_type "$token_type" --token_list "$tokens")
if begin 2 "tokens ($token_type)" "$token_dir/.stamp" --input "$datadir/$train_set/text"; then
    mkdir -p "$token_dir"
    if [ "$token_type" != bpe ]; then
        logged "$token_dir/tokenize_text.log" -- "$python" -m espnet2.bin.tokenize_text \
            --input "$datadir/$train_set/text" --field 2- --token_type "$token_type" \
            --write_vocabulary true --output "$tokens" \
            --add_symbol "<blank>:0" --add_symbol "<unk>:1" --add_symbol "<sos/eos>:-1"
    else
        run "$python" -m recipe.bpe --text "$datadir/$train_set/text" --nbpe "$nbpe" \
            --output "$token_dir"
    fi
    outputs=("$tokens")
    [ "$token_type" != bpe ] || outputs+=("$token_dir/bpe.model")
    finish --output "${outputs[@]}"
fi
training_inputs=("$train_config" "$tokens" "$content" "$datadir"/{"$train_set","$valid_set"}/{"$scp",text})
if [ "$token_type" = bpe ]; then
    token_options+=(--bpemodel "$token_dir/bpe.model")
    training_inputs+=("$token_dir/bpe.model")
fi

if [ "$stage" -le 4 ] && [ "$stop_stage" -ge 3 ]; then
    run "$python" -m recipe.stamp claim "$expdir/.stamps/claim" --directory "$train" \
        --input "${training_inputs[@]}" --setting "seed=$seed"
fi
common_options=(--config "$train_config" "${token_options[@]}" "${input_options[@]}"
    ${seed:+--seed "$seed"} --ngpu 0)
for kind in train valid; do
    set=${kind}_set
    common_options+=(
        "--${kind}_data_path_and_name_and_type" "$datadir/${!set}/$scp,speech,$type"
        "--${kind}_data_path_and_name_and_type" "$datadir/${!set}/text,text,text"
    )
done

# Every configuration is tried before the first of the stages that take long.
checked=false
normalize_options=()
check_configurations() {
    ! $checked || return 0
    local options=(--train_config "$train_config") config option normalization
    normalization=$("$python" -m recipe.normalization --config "$train_config" \
        --stats_file "$stats/train/feats_stats.npz")
    while read -r option; do
        [ -z "$option" ] || normalize_options+=("$option")
    done <<<"$normalization"
    for config in "${decode_configs[@]}"; do options+=(--decode_config "$config"); done
    run "$python" -m recipe.check "${options[@]}" "${token_options[@]}" "${input_options[@]}" \
        "${normalize_options[@]}" \
        --text "$datadir/$train_set/text" --text "$datadir/$valid_set/text"
    checked=true
}

if begin 3 "statistics" "$expdir/.stamps/stats" --input "${training_inputs[@]}"; then
    check_configurations
    rm -rf "$stats" "$stats.1"
    # they are what global_mvn normalises with, and cannot have it in their making
    logged "$expdir/logs/stats.log" -- "$python" -m espnet2.bin.asr_transducer_train \
        --collect_stats true --output_dir "$stats.1" "${common_options[@]}" \
        --normalize none \
        --train_shape_file "$datadir/$train_set/$scp" \
        --valid_shape_file "$datadir/$valid_set/$scp"
    logged "$expdir/logs/stats.log" -- "$python" -m espnet2.bin.aggregate_stats_dirs \
        --input_dir "$stats.1" --output_dir "$stats"
    rm -rf "$stats.1"
    finish --output "$stats/train/feats_stats.npz" "$stats"/{train,valid}/{speech,text}_shape
fi

if begin 4 "training" "$expdir/.stamps/train" \
    --input "${training_inputs[@]}" "$stats/train/feats_stats.npz"; then
    check_configurations
    run "$python" -m recipe.checkpoint mend "$train" --lock "$expdir/.stamps/lock"
    logged "$expdir/logs/train.log" --progress train --lock "$expdir/.stamps/lock" -- \
        "$python" -m espnet2.bin.asr_transducer_train \
        --resume true --output_dir "$train" "${common_options[@]}" \
        --train_shape_file "$stats/train/speech_shape" \
        --train_shape_file "$stats/train/text_shape" \
        --valid_shape_file "$stats/valid/speech_shape" \
        --valid_shape_file "$stats/valid/text_shape" \
        "${normalize_options[@]}"
    run "$python" -m recipe.checkpoint check_complete "$train"
    finish --output "$model" "$train/config.yaml" "$train/images/loss.png"
fi

decoded=("${decode_sets[@]/#/$datadir/}")
decode_dirs=()
for config in "${decode_configs[@]}"; do
    search=$(basename "${config%.*}")
    decode_dirs+=("$expdir/$search")
    # one process for all sets: to start it can take longer than to decode
    if begin 5 "decoding, $search" "$expdir/.stamps/$search" \
        --input "$model" "$train/config.yaml" "$config" "$content" "${decoded[@]/%//$scp}"; then
        check_configurations
        rm -rf "${expdir:?}/$search"
        mkdir -p "$expdir/$search"
        cat "${decoded[@]/%//$scp}" >"$expdir/$search/$scp"
        rm -f "$expdir/logs/$search.log"
        logged "$expdir/logs/$search.log" --progress decode -- \
            "$python" -m espnet2.bin.asr_transducer_inference \
            --config "$config" --output_dir "$expdir/$search" --ngpu 0 --num_workers 0 \
            --asr_train_config "$train/config.yaml" --asr_model_file "$model" \
            --data_path_and_name_and_type "$expdir/$search/$scp,speech,$type" \
            --display_hypotheses true
        finish --output "$expdir/$search/1best_recog/text"
    fi
done

streams=()
for config in "${decode_configs[@]}"; do
    [ -n "$stream_seconds" ] || break
    grep -qE '^streaming: *true' "$config" || continue
    search=$(basename "${config%.*}")
    set=${decoded[${#decoded[@]} - 1]}
    streams+=("$expdir/$search/stream.md" "$expdir/$search/stream.png")
    if begin 5 "a stream, $search" "$expdir/.stamps/${search}_stream" \
        --input "$model" "$train/config.yaml" "$config" "$content" "$set/$scp" "$set/text" \
        --setting "seconds=$stream_seconds"; then
        run "$python" -m recipe.streaming --config "$config" \
            --asr_train_config "$train/config.yaml" --asr_model_file "$model" \
            --test_set "$set" --seconds "$stream_seconds" --output_dir "$expdir/$search"
        finish --output "$expdir/$search"/stream.{json,md,png}
    fi
done

hypotheses=()
for directory in "${decode_dirs[@]}"; do hypotheses+=("$directory/1best_recog/text"); done
if begin 6 "pictures and table" "$expdir/.stamps/results" \
    --input "$model" "${hypotheses[@]}" "${decoded[@]/%//text}" "${streams[@]}"; then
    pictures=(--picture "$train/images/loss.png")
    if grep -qE '^decoder: mega(_bias)?$' "$train/config.yaml"; then
        rm -f "$train/images/bias.png"
        run "$python" -m espnet_mega_bias plot "$model" --output "$train/images/bias.png"
        pictures+=(--picture "$train/images/bias.png")
    fi
    for file in "${streams[@]}"; do pictures+=(--picture "$file"); done
    options=(--title "$title" --note "$note" --train "$train" --logs "$expdir/logs")
    [ -z "$fold" ] || options+=(--fold "$fold" --fold_options="$prepare_options")
    ! $list_utterances || options+=(--list_utterances)
    run "$python" -m recipe.score --datadir "$datadir" --sets "${decode_sets[@]}" \
        "${options[@]}" "${pictures[@]}" --output "$expdir/RESULTS.md" \
        --decode_dirs "${decode_dirs[@]}"
    finish --output "$expdir/RESULTS.md" "$expdir/results.json"
fi

if [ -n "$pack" ] && begin 6 "packed model" "$expdir/.stamps/pack" --setting "pack=$pack" \
    --input "$model" "$train/config.yaml" "$expdir/RESULTS.md"; then
    run "$python" -m recipe.pack --config "$train/config.yaml" --model "$model" \
        --option "$expdir/RESULTS.md" --output "$pack"
    finish --output "$pack"
fi

if [ "$stop_stage" -eq 6 ]; then
    run "$python" -m recipe.score --show "$expdir/RESULTS.md" \
        ${max_train_wer:+--max_train_wer "$max_train_wer" --train_set "$train_set"}
fi

exit
}
