#!/usr/bin/env bash
# AN4: this decoder beside ESPnet's, under the same budget, and with three seeds.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../../TEMPLATE/asr_transducer1/compare.sh" --recipe "$here" \
    --title "AN4: decoders under the same budget" --reference train_rnn \
    --training train_mega_bias_rotary:1 --training train_mega_bias_simple:1 \
    --training train_mega_rotary:1 --training train_rnn:1 --training train_stateless:1 \
    --training train_mega_bias_rotary:2 --training train_mega_bias_rotary:3 \
    --time "AN4: the seven trainings together take about 3 hours on a free core" "$@"
