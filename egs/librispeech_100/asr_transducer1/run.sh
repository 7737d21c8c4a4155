#!/usr/bin/env bash
# LibriSpeech-100 with the asr.sh of an ESPnet checkout: its data preparation, its stages
# and its scoring; the configurations are this project's.
set -euo pipefail

{ # bash reads this group to its end first: an edit meanwhile does not reach a run

usage() {
    cat <<USAGE
Usage: ./run.sh --espnet_root DIR [options] [options of asr.sh]

Trains and decodes a transducer on LibriSpeech-100 with egs2/TEMPLATE/asr1/asr.sh of an
ESPnet checkout. The checkout stays as it is: all that is written goes to --workdir,
where its scripts are linked.

Options:
  --espnet_root DIR     the checkout (default: the variable ESPNET_ROOT)
  --librispeech DIR     the folder that holds LibriSpeech/train-clean-100 and so on
                        (default: LIBRISPEECH of the checkout's db.sh, which stands at
                        "downloads": what is missing is downloaded into the workdir)
  --workdir DIR         (default $workdir)
  --check               stop after the checks, before asr.sh
  --help

All others go to asr.sh, after those that are given here (the last one counts):
USAGE
    printf "  --%s '%s'\n" "${defaults[@]}"
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
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../../.." && pwd)

root=${ESPNET_ROOT:-}
librispeech=
workdir=$here/work
python=python3
only_check=false
help=false
asr_config=$top/conf/train_librispeech_100_mega_bias.yaml
inference_config=$top/conf/decode_default.yaml
train_set=train_clean_100
options=()

while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        help=true
        shift
        continue
        ;;
    --check)
        only_check=true
        shift
        continue
        ;;
    --*=*) die "write '${1%%=*} ${1#*=}', not '$1'" ;;
    --*) [ $# -ge 2 ] || die "option $1 needs a value" ;;
    *) die "unknown option '$1' (--help lists the options)" ;;
    esac
    case $1 in
    --espnet_root) root=$(absolute "$2") ;;
    --librispeech) librispeech=$(absolute "$2") ;;
    --workdir) workdir=$(absolute "$2") ;;
    --asr_config) asr_config=$(absolute "$2") ;;
    --inference_config) inference_config=$(absolute "$2") ;;
    --python)
        python=$2
        options+=("$1" "$2")
        ;;
    *) options+=("$1" "$2") ;;
    esac
    shift 2
done

# Data, BPE units and augmentation are those of ESPnet's own run.sh, to compare with its
# results (espnet/espnet@a14d6f6 egs2/librispeech_100/asr_transducer1/run.sh). The stages
# of local/data.sh after the third fetch texts for a language model.
defaults=(
    asr_task asr_transducer
    lang en
    ngpu 1
    nj 32
    inference_nj 32
    nbpe 500
    max_wav_duration 30
    speed_perturb_factors "0.9 1.0 1.1"
    audio_format flac.ark
    feats_type raw
    use_lm false
    asr_config "$asr_config"
    inference_config "$inference_config"
    inference_asr_model valid.loss.ave.pth
    train_set "$train_set"
    valid_set dev
    test_sets "test_clean test_other dev_clean dev_other"
    lm_train_text "data/$train_set/text"
    bpe_train_text "data/$train_set/text"
    local_data_opts "--stop_stage 3"
)
if $help; then
    usage
    exit 0
fi

[ -n "$root" ] || die "which ESPnet checkout? --espnet_root DIR, or ESPNET_ROOT=DIR in the environment"
[ -d "$root" ] || die "no such folder: $root (--espnet_root, or the variable ESPNET_ROOT)"
root=$(cd "$root" && pwd)
recipe=$root/egs2/librispeech_100/asr_transducer1
for file in asr.sh path.sh cmd.sh db.sh; do
    [ -f "$recipe/$file" ] || die "$root is no ESPnet checkout with this recipe:" \
        "egs2/librispeech_100/asr_transducer1/$file is missing (the pip package has no" \
        "egs2; git clone https://github.com/espnet/espnet)"
done
for file in utils/parse_options.sh steps; do
    [ -e "$recipe/$file" ] || die "egs2/librispeech_100/asr_transducer1/$file in $root leads" \
        "nowhere: Kaldi is not there; link a Kaldi checkout as $root/tools/kaldi"
done
for file in "$asr_config" "$inference_config"; do
    [ -f "$file" ] || die "no such file: $file"
done
[ -z "$librispeech" ] || [ -d "$librispeech" ] || die "no such folder: $librispeech (--librispeech)"
case "$workdir$asr_config$inference_config$librispeech$root" in
*[[:space:]]*) die "asr.sh takes no path with a space: move what has one in its path" ;;
esac

# asr.sh would tell a misspelt option as well, but not before it has begun
for ((i = 0; i < ${#options[@]}; i += 2)); do
    name=${options[i]#--}
    name=${name//-/_}
    [ "$name" = config ] || grep -q "^$name=" "$recipe/asr.sh" ||
        die "neither run.sh nor the asr.sh of $root has an option --$name (--help)"
done
passed=()
for ((i = 0; i < ${#defaults[@]}; i += 2)); do
    grep -q "^${defaults[i]}=" "$recipe/asr.sh" ||
        die "the asr.sh of $root has no option --${defaults[i]}: too old or too new an ESPnet"
    passed+=("--${defaults[i]}" "${defaults[i + 1]}")
done

# The scripts work in the folder where they are called, and know files beside them.
mkdir -p "$workdir"
cd "$workdir"
for file in "$recipe"/*; do
    name=${file##*/}
    case $name in
    run.sh | path.sh | db.sh | README.md | RESULTS.md | data | downloads | dump | exp) continue ;;
    esac
    # a file of the user's own, such as a cmd.sh for a cluster, is left alone
    [ -e "$name" ] && [ ! -L "$name" ] || ln -sfn "$file" "$name"
done
cat >path.sh <<SOURCE
# Written by run.sh: path.sh of the checkout looks for ESPnet three folders up.
_workdir=\$PWD
cd "$recipe"
. ./path.sh
cd "\$_workdir"
SOURCE
{
    echo "# Written by run.sh."
    echo ". \"$recipe/db.sh\""
    [ -z "$librispeech" ] || echo "LIBRISPEECH=\"$librispeech\""
} >db.sh

# as asr.sh does it, in a shell of its own
in_checkout() {
    bash -euo pipefail -c '. ./path.sh >&2
        "$@"' run.sh "$@"
}
said=$(in_checkout true 2>&1) || die "path.sh of $root fails, which sets up its Python:" \
    "${said##*$'\n'}"
found=$(in_checkout command -v "$python" 2>/dev/null) ||
    die "no such Python where path.sh of $root has been read: $python"
for needed in "flac 1" "sox 2" "bc 2" "sclite 13"; do
    in_checkout command -v "${needed% *}" >/dev/null 2>&1 ||
        echo "run.sh: warning: no ${needed% *}, which stage ${needed#* } of asr.sh calls" >&2
done
echo "Checks, with $found"
in_checkout env PYTHONPATH="$top/egs/TEMPLATE" "$python" -m recipe.check \
    --train_config "$asr_config" --decode_config "$inference_config" \
    --normalize global_mvn </dev/null # as asr.sh
! $only_check || exit 0

exec ./asr.sh "${passed[@]}" ${options[@]+"${options[@]}"}
}
