#!/usr/bin/env bash
# AN4: the longer training, with three seeds, beside ESPnet's LSTM.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$here/exp/comparison_110_epochs
exec "$here/../../TEMPLATE/asr_transducer1/compare.sh" --script compare_110_epochs.sh \
    --recipe "$here" --expdir "$results" --output "$results/RESULTS.md" \
    --title "AN4: 110 epochs" --reference train_rnn_110_epochs \
    --training train_mega_bias_rotary_110_epochs:1 \
    --training train_mega_bias_rotary_110_epochs:2 \
    --training train_mega_bias_rotary_110_epochs:3 \
    --training train_rnn_110_epochs:1 \
    --time "AN4: the four trainings together take about 4 hours on a free core" "$@"
