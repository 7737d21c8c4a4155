#!/usr/bin/env bash
# FSDD: each of the six speakers once left out of the training.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$here/exp/comparison_speakers
exec "$here/../../TEMPLATE/asr_transducer1/compare.sh" --script compare_speakers.sh \
    --recipe "$here" --expdir "$results" --output "$results/RESULTS.md" \
    --title "FSDD: each speaker once left out" --training train_mega_bias_rotary:1 \
    --fold "--test_speaker george" --fold "--test_speaker jackson" \
    --fold "--test_speaker lucas" --fold "--test_speaker nicolas" \
    --fold "--test_speaker theo" --fold "--test_speaker yweweler" \
    --time "FSDD: the six trainings together take about 3 hours on a free core" "$@"
