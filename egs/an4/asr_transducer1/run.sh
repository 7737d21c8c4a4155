#!/usr/bin/env bash
# AN4 with ESPnet2's command lines: from the archive to a table of error rates.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../../.." && pwd)
exec "$top/egs/TEMPLATE/asr_transducer1/asr_transducer.sh" --recipe "$here" --title AN4 \
    --archives "an4_sphere.tar.gz, or one of its Sphinx
                        cepstra (default: the audio, downloaded from CMU, 64 MB)" \
    --train_set train_nodev --valid_set train_dev --decode_sets "train_dev test" \
    --train_config "$here/conf/train_mega_bias_rotary.yaml" \
    --decode_configs "$top/conf/decode_default.yaml" \
    --inference_asr_model valid.loss.ave.pth \
    --time "about 30 minutes on a free core (with 110 epochs an hour, with VGG 80 minutes)" \
    "$@"
