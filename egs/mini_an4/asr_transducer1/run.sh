#!/usr/bin/env bash
# mini_an4 with ESPnet2's command lines: from the archive to a table of error rates.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../../.." && pwd)
exec "$top/egs/TEMPLATE/asr_transducer1/asr_transducer.sh" --recipe "$here" \
    --title mini_an4 --train_set train --valid_set valid --decode_sets "train valid test" \
    --archives "downloads.tar.gz, or an ESPnet wheel
                        with it (default: the installed ESPnet's, else pip's download)" \
    --train_config "$top/conf/train_mini_an4_mega_bias.yaml" \
    --decode_configs "$top/conf/decode_default.yaml $here/conf/decode_maes.yaml" \
    --list_utterances --note "Four training utterances show that everything runs, not how good \
a model can be: learnt by heart, they come out right, and the others cannot." \
    "$@"
