#!/usr/bin/env bash
# Several trainings of one recipe, and one table of them. A recipe's compare.sh calls
# this with what is its own.
set -euo pipefail

{ # bash reads this group to its end first: an edit meanwhile does not reach a run

usage() {
    cat <<USAGE
Usage: ./$script [options] [-- options for run.sh]

Trains and decodes with run.sh, once for each of
$(printf '  %s\n' "${trainings[@]}")${folds[0]:+
with each of
$(printf '  %s\n' "${folds[@]}")}
and writes the table of all into $output. What is finished is not run again, an
interrupted training goes on.

Options:
  --jobs N         trainings at a time (default $jobs); with more than one, what run.sh
                   says is in <expdir>/<training>.log
  --expdir DIR     (default $expdir)
  --output FILE    (default $output)
  --python FILE    the Python that has ESPnet (default python3)
  --help
$time
USAGE
}

die() {
    echo "$script: error: $*" >&2
    exit 1
}

absolute() {
    case $1 in
    /*) echo "$1" ;;
    *) echo "$caller_dir/$1" ;;
    esac
}

caller_dir=$PWD
template=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=compare.sh
recipe=
title=
reference=
trainings=() # CONFIGURATION:SEED
folds=()     # options of run.sh that choose one division of the corpus
time=
notes=
jobs=1
expdir=
output=
python=python3
help=false
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        help=true
        shift
        continue
        ;;
    --)
        shift
        break
        ;;
    --script | --recipe | --title | --reference | --training | --fold | --time | --notes | \
        --jobs | --expdir | --output | --python)
        [ $# -ge 2 ] || die "option $1 needs a value"
        ;;
    *) die "unknown option '$1' (--help lists the options)" ;;
    esac
    case $1 in
    --script) script=$2 ;; # whose options these are
    --recipe) recipe=$2 ;;
    --title) title=$2 ;;
    --reference) reference=$2 ;;
    --training) trainings+=("$2") ;;
    --fold) folds+=("$2") ;;
    --time) time=$2 ;;
    --notes) notes=$(absolute "$2") ;;
    --jobs) jobs=$2 ;;
    --expdir) expdir=$(absolute "$2") ;;
    --output) output=$(absolute "$2") ;;
    --python)
        case $2 in
        */*) python=$(absolute "$2") ;;
        *) python=$2 ;;
        esac
        ;;
    esac
    shift 2
done
[ -n "$recipe" ] || die "no --recipe: use the compare.sh of a recipe"
[ ${#folds[@]} -gt 0 ] || folds=("") # the corpus has one division
expdir=${expdir:-$recipe/exp/comparison}
output=${output:-$recipe/exp/comparison/RESULTS.md}
if $help; then
    usage
    exit 0
fi
case $jobs in
[1-9] | [1-9][0-9]) ;;
*) die "--jobs is a number from 1 to 99, not '$jobs'" ;;
esac

experiment() { # CONFIGURATION:SEED, fold: the name of its folder
    local words=${2//--/}
    echo "${1%:*}_seed${1#*:}${words:+_${words// /_}}"
}

train() { # CONFIGURATION:SEED, fold [options for run.sh]
    local config=${1%:*} seed=${1#*:} folder options
    folder=$expdir/$(experiment "$1" "$2")
    IFS=' ' read -r -a options <<<"$2"
    shift 2
    exec "$recipe/run.sh" --python "$python" --train_config "$recipe/conf/$config.yaml" \
        --seed "$seed" --expdir "$folder" ${options[@]+"${options[@]}"} "$@"
}

[ -z "$time" ] || echo "$time"
mkdir -p "$expdir"
if [ "$jobs" -eq 1 ]; then
    for training in "${trainings[@]}"; do
        for fold in "${folds[@]}"; do
            echo "== ${training%:*}, seed ${training#*:}${fold:+, $fold}"
            (train "$training" "$fold" "$@")
        done
    done
else
    # All of one division have the data and the tokens in common.
    for fold in "${folds[@]}"; do (train "${trainings[0]}" "$fold" --stop_stage 2 "$@"); done
    # Started in the background, run.sh does not see Ctrl-C. In a trap, a wait can end at
    # once, for the signal that led there.
    trap 'trap "" INT TERM; kill -TERM $(jobs -pr) 2>/dev/null || :
        until wait; do :; done; exit 130' INT TERM
    failed=0
    for training in "${trainings[@]}"; do
        for fold in "${folds[@]}"; do
            while [ "$(jobs -pr | wc -l)" -ge "$jobs" ]; do wait -n || failed=1; done
            (
                name=$(experiment "$training" "$fold")
                trap 'kill -TERM ${!-} 2>/dev/null || :; until wait; do :; done; exit 143' TERM
                train "$training" "$fold" "$@" >"$expdir/$name.log" 2>&1 &
                echo "$name: started"
                if wait $!; then
                    echo "$name: finished"
                else
                    echo "$name: failed: $(tail -n 1 "$expdir/$name.log")"
                    exit 1
                fi
            ) &
        done
    done
    status=0
    until [ "$status" -eq 127 ]; do # there is none left
        [ "$status" -eq 0 ] || failed=1
        status=0
        wait -n || status=$?
    done
    [ "$failed" -eq 0 ] || die "not all trainings came to their end; the same command goes on"
fi

experiments=()
for training in "${trainings[@]}"; do
    for fold in "${folds[@]}"; do
        experiments+=("$expdir/$(experiment "$training" "$fold")")
    done
done
PYTHONPATH=$template${PYTHONPATH:+:$PYTHONPATH} "$python" -m recipe.compare \
    --title "$title" ${reference:+--reference "$reference"} ${notes:+--notes "$notes"} \
    --output "$output" --experiments "${experiments[@]}"

exit
}
