#!/usr/bin/env bash
# Digit strings of FSDD with ESPnet2's command lines: from the archive to a table of
# error rates, for one division of the six speakers.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../../.." && pwd)

speakers=(george jackson lucas nicolas theo yweweler)
test_speaker=yweweler
dev_speaker=
options=()
help=false

die() {
    echo "run.sh: error: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
    --test_speaker | --dev_speaker)
        [ $# -ge 2 ] || die "option $1 needs a value"
        case " ${speakers[*]} " in
        *" $2 "*) ;;
        *) die "$1 is one of ${speakers[*]}, not '$2'" ;;
        esac
        declare "${1#--}=$2"
        shift
        ;;
    --help | -h)
        help=true
        options+=("$1")
        ;;
    *) options+=("$1") ;;
    esac
    shift
done
if [ -z "$dev_speaker" ]; then
    for index in "${!speakers[@]}"; do
        [ "${speakers[index]}" != "$test_speaker" ] ||
            dev_speaker=${speakers[(index + 1) % ${#speakers[@]}]}
    done
fi
[ "$dev_speaker" != "$test_speaker" ] || die "$dev_speaker cannot be both speakers"

stages=("$top/egs/TEMPLATE/asr_transducer1/asr_transducer.sh" --recipe "$here" --title FSDD
    --archives "free-spoken-digit-dataset-1.0.10.tar.gz, or any
                        with its recordings/ (default: downloaded from GitHub)"
    --fold "test_${test_speaker}_dev_$dev_speaker"
    --prepare_options "--test_speaker $test_speaker --dev_speaker $dev_speaker"
    --note "Tested on $test_speaker, chosen on $dev_speaker, trained on the other four speakers."
    --train_set train --valid_set dev --decode_sets "dev test" --token_type char
    --train_config "$here/conf/train_mega_bias_rotary.yaml"
    --decode_configs "$top/conf/decode_default.yaml"
    --inference_asr_model valid.loss.ave.pth
    --time "about 30 minutes on a free core" "${options[@]}")
if $help; then
    "${stages[@]}"
    cat <<USAGE

FSDD's own:
  --test_speaker NAME   (default yweweler); one of
                        ${speakers[*]}
  --dev_speaker NAME    (default the one after the test speaker); the other four are
                        trained on
USAGE
    exit
fi
exec "${stages[@]}"
