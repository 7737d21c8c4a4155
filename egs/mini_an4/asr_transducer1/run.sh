#!/usr/bin/env bash
# mini_an4 with ESPnet2's command lines: from the archive to a table of error rates.
set -euo pipefail

{ # bash reads this group to its end first: an edit meanwhile does not reach a run

usage() {
    cat <<'USAGE'
Usage: ./run.sh [options]

Trains and decodes a transducer with `decoder: mega_bias` on the seven utterances
of mini_an4, through ESPnet's own command lines.

Stages (finished ones are not run again, an interrupted training goes on):
  0  check of the installation (always)
  1  data          2  tokens        3  statistics
  4  training      5  decoding      6  pictures and table
The configurations are checked before the first of stages 3 to 5 that is to be run.

Options:
  --stage N             first stage to run (default 1)
  --stop_stage N        last stage to run (default 6)
  --archive FILE        a local downloads.tar.gz of mini_an4, or an ESPnet wheel that
                        has it (default: the installed ESPnet's, else pip's download)
  --train_config FILE   (default <top>/conf/train_mini_an4_mega_bias.yaml)
  --decode_configs "FILE ..."  (default <top>/conf/decode_default.yaml and conf/decode_maes.yaml)
  --datadir DIR         (default data)
  --expdir DIR          (default exp/<name of train_config>_espnet<version>)
  --python FILE         the Python that has ESPnet (default python3)
  --max_train_wer X     fail where the WER on the training set ends above X %
  --help
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
here=$PWD
top=$(cd ../../.. && pwd)

stage=1
stop_stage=6
archive=
train_config=$top/conf/train_mini_an4_mega_bias.yaml
decode_configs=("$top/conf/decode_default.yaml" "$here/conf/decode_maes.yaml")
datadir=$here/data
expdir=
python=python3
max_train_wer=

while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --stage | --stop_stage | --archive | --train_config | --decode_configs | --datadir | \
        --expdir | --python | --max_train_wer)
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
    --datadir) datadir=$(absolute "$2") ;;
    --expdir) expdir=$(absolute "$2") ;;
    --python)
        case $2 in
        */*) python=$(absolute "$2") ;;
        *) python=$2 ;;
        esac
        ;;
    --max_train_wer) max_train_wer=$2 ;;
    esac
    shift 2
done
for number in "$stage" "$stop_stage"; do
    case $number in
    [0-6]) ;;
    *) die "a stage is a number from 0 to 6, not '$number'" ;;
    esac
done
[ ${#decode_configs[@]} -gt 0 ] || die "--decode_configs names no file"
for file in "$train_config" "${decode_configs[@]}" ${archive:+"$archive"}; do
    [ -f "$file" ] || die "no such file: $file"
done
command -v "$python" >/dev/null || die "no such Python: $python"
if [ -z "$expdir" ]; then
    find_version='from importlib.metadata import version; print(version("espnet"))'
    version=$("$python" -c "$find_version" 2>/dev/null) || version=
    expdir=$here/exp/$(basename "${train_config%.*}")_espnet$version
fi
case $datadir$expdir in
*,*) die "ESPnet cannot take a comma in --datadir or --expdir" ;;
esac

# with a model and batches as small as these, further threads only wait for each other
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MPLBACKEND=Agg

# Every child runs in the background, so that a signal reaches this shell, and
# through it the child, at once.
child=
interrupted() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
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

# logged LOG [job.py's options] -- COMMAND...: output to a file, progress to the screen
logged() {
    local log=$1
    shift
    run "$python" local/job.py --log "$log" "$@"
}

# if begin NUMBER TITLE STAMP DEPENDENCIES; then ...; finish OUTPUTS; fi
# A stage is run if it was asked for and its stamp does not show that it was finished
# with the same dependencies, its outputs unchanged since.
begin() {
    local number=$1 title=$2 status=0
    stamp=$3
    shift 3
    dependencies=("$@")
    [ "$stage" -le "$number" ] && [ "$number" -le "$stop_stage" ] || return 1
    run "$python" local/stamp.py finished "$stamp" "${dependencies[@]}" || status=$?
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
    run "$python" local/stamp.py record "$stamp" "${dependencies[@]}" "$@"
    echo "  done in $SECONDS s"
}

tokens=$datadir/token_list/char/tokens.txt
stats=$expdir/stats
train=$expdir/train
model=$train/latest.pth

echo "Stage 0: checks"
run "$python" local/check.py

if begin 1 "data" "$datadir/.stamps/data" ${archive:+--input "$archive"}; then
    run "$python" local/prepare.py --datadir "$datadir" ${archive:+--archive "$archive"}
    finish --output "$datadir"/{train,valid,test,all}/{wav.scp,text} \
        "$datadir/downloads.tar.gz" "$datadir"/corpus/an4/wav/*/*/*.sph
fi

if begin 2 "character tokens" "$datadir/.stamps/tokens" --input "$datadir/train/text"; then
    mkdir -p "$(dirname "$tokens")"
    logged "$(dirname "$tokens")/tokenize_text.log" -- "$python" -m espnet2.bin.tokenize_text \
        --input "$datadir/train/text" --field 2- --token_type char \
        --write_vocabulary true --output "$tokens" \
        --add_symbol "<blank>:0" --add_symbol "<unk>:1" --add_symbol "<sos/eos>:-1"
    finish --output "$tokens"
fi

training_inputs=("$train_config" "$tokens" "$datadir"/{train,valid}/{wav.scp,text})
if [ "$stage" -le 4 ] && [ "$stop_stage" -ge 3 ]; then
    run "$python" local/stamp.py claim "$expdir/.stamps/claim" --directory "$train" \
        --input "${training_inputs[@]}"
fi
common_options=(--config "$train_config" --token_list "$tokens" --ngpu 0)
for set in train valid; do
    common_options+=(
        "--${set}_data_path_and_name_and_type" "$datadir/$set/wav.scp,speech,sound"
        "--${set}_data_path_and_name_and_type" "$datadir/$set/text,text,text"
    )
done

# Every configuration is tried before the first of the stages that take long.
checked=false
check_configurations() {
    ! $checked || return 0
    local options=(--train_config "$train_config") config
    for config in "${decode_configs[@]}"; do options+=(--decode_config "$config"); done
    run "$python" local/check.py "${options[@]}" --token_list "$tokens" \
        --text "$datadir/train/text" --text "$datadir/valid/text"
    checked=true
}

if begin 3 "statistics" "$expdir/.stamps/stats" --input "${training_inputs[@]}"; then
    check_configurations
    rm -rf "$stats" "$stats.1"
    logged "$expdir/logs/stats.log" -- "$python" -m espnet2.bin.asr_transducer_train \
        --collect_stats true --output_dir "$stats.1" "${common_options[@]}" \
        --train_shape_file "$datadir/train/wav.scp" --valid_shape_file "$datadir/valid/wav.scp"
    logged "$expdir/logs/stats.log" -- "$python" -m espnet2.bin.aggregate_stats_dirs \
        --input_dir "$stats.1" --output_dir "$stats"
    rm -rf "$stats.1"
    finish --output "$stats/train/feats_stats.npz" "$stats"/{train,valid}/{speech,text}_shape
fi

if begin 4 "training" "$expdir/.stamps/train" --input "${training_inputs[@]}" \
    "$stats/train/feats_stats.npz"; then
    check_configurations
    run "$python" local/checkpoint.py mend "$train" --lock "$expdir/.stamps/lock"
    logged "$expdir/logs/train.log" --progress train --lock "$expdir/.stamps/lock" -- \
        "$python" -m espnet2.bin.asr_transducer_train \
        --resume true --output_dir "$train" "${common_options[@]}" \
        --train_shape_file "$stats/train/speech_shape" \
        --train_shape_file "$stats/train/text_shape" \
        --valid_shape_file "$stats/valid/speech_shape" \
        --valid_shape_file "$stats/valid/text_shape" \
        --normalize global_mvn --normalize_conf "stats_file=$stats/train/feats_stats.npz"
    run "$python" local/checkpoint.py check_complete "$train"
    finish --output "$model" "$train/config.yaml" "$train/images/loss.png"
fi

decode_dirs=()
for config in "${decode_configs[@]}"; do
    search=$(basename "${config%.*}")
    decode_dirs+=("$expdir/$search")
    # one process for all three sets: to start it takes longer than to decode
    if begin 5 "decoding, $search" "$expdir/.stamps/$search" \
        --input "$model" "$train/config.yaml" "$config" "$datadir/all/wav.scp"; then
        check_configurations
        rm -rf "${expdir:?}/$search"
        logged "$expdir/logs/$search.log" --progress decode -- \
            "$python" -m espnet2.bin.asr_transducer_inference \
            --config "$config" --output_dir "$expdir/$search" --ngpu 0 --num_workers 0 \
            --asr_train_config "$train/config.yaml" --asr_model_file "$model" \
            --data_path_and_name_and_type "$datadir/all/wav.scp,speech,sound" \
            --display_hypotheses true
        finish --output "$expdir/$search/1best_recog/text"
    fi
done

hypotheses=()
for directory in "${decode_dirs[@]}"; do hypotheses+=("$directory/1best_recog/text"); done
if begin 6 "pictures and table" "$expdir/.stamps/results" \
    --input "$model" "${hypotheses[@]}" "$datadir"/{train,valid,test}/text; then
    run "$python" local/plot_bias.py --train_config "$train/config.yaml" --model_file "$model" \
        --output "$train/images/bias.png"
    run "$python" local/score.py --datadir "$datadir" --output "$expdir/RESULTS.md" \
        --picture "$train/images/loss.png" --picture "$train/images/bias.png" \
        "${decode_dirs[@]}"
    finish --output "$expdir/RESULTS.md" "$train/images/bias.png"
fi

if [ "$stop_stage" -eq 6 ]; then
    run "$python" local/score.py --show "$expdir/RESULTS.md" \
        ${max_train_wer:+--max_train_wer "$max_train_wer"}
fi

exit
}
