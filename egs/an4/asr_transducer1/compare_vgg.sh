#!/usr/bin/env bash
# AN4: the training with VGG's convolutions before the encoder, with three seeds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$here/exp/comparison_vgg
exec "$here/../../TEMPLATE/asr_transducer1/compare.sh" --script compare_vgg.sh \
    --recipe "$here" --expdir "$results" --output "$results/RESULTS.md" \
    --title "AN4: VGG's convolutions before the encoder" \
    --training train_mega_bias_rotary_vgg_90_epochs:1 \
    --training train_mega_bias_rotary_vgg_90_epochs:2 \
    --training train_mega_bias_rotary_vgg_90_epochs:3 \
    --time "AN4: the three trainings together take about 4 hours on a free core" "$@"
