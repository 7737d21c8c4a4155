#!/usr/bin/env bash
# AN4: VGG's convolutions before the encoder, with three seeds, beside ESPnet's LSTM.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$here/exp/comparison_vgg
exec "$here/../../TEMPLATE/asr_transducer1/compare.sh" --script compare_vgg.sh \
    --recipe "$here" --expdir "$results" --output "$results/RESULTS.md" \
    --title "AN4: VGG's convolutions before the encoder" \
    --reference train_rnn_vgg_90_epochs \
    --training train_mega_bias_rotary_vgg_90_epochs:1 \
    --training train_mega_bias_rotary_vgg_90_epochs:2 \
    --training train_mega_bias_rotary_vgg_90_epochs:3 \
    --training train_rnn_vgg_90_epochs:1 \
    --time "AN4: the four trainings together take about 5 hours on a free core" "$@"
