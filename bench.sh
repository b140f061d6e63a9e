#!/usr/bin/env bash
# Measures a running server with `penstock bench serve`: six kinds of load, a JSON file for each run.
set -euo pipefail

usage() {
    cat <<'END'
usage: bench.sh [flags] [-- flags of `penstock bench serve`]

  -H, --host HOST       server (default: localhost)
  -p, --port PORT       its port (default: 8000)
  -m, --model NAME      model (default: the first one the server lists)
  -T, --tokenizer NAME  tokenizer, where it is not the model's
  -t, --type A,B        kinds of load (default: all): throughput prefill decode latency
                        concurrency sharegpt
  -d, --dataset FILE    ShareGPT conversations; fetched into the output folder where it is missing
  -o, --output DIR      folder for the results (default: results-DATE-TIME)
  -i, --image IMAGE     run the client in a container of this image; a file such as
                        tensorrt-llm-serve-latest.tar.gz is loaded first

What follows `--` wins over what this script says, such as `-- --num-prompts 8`.
END
}

all_types=(throughput prefill decode latency concurrency sharegpt)
host=localhost port=8000 model='' tokenizer='' types='' dataset='' output='' image=''
while (($#)); do
    case $1 in
        -H | --host) host=$2 && shift 2 ;;
        -p | --port) port=$2 && shift 2 ;;
        -m | --model) model=$2 && shift 2 ;;
        -T | --tokenizer) tokenizer=$2 && shift 2 ;;
        -t | --type) types=$2 && shift 2 ;;
        -d | --dataset) dataset=$2 && shift 2 ;;
        -o | --output) output=$2 && shift 2 ;;
        -i | --image) image=$2 && shift 2 ;;
        -h | --help) usage && exit 0 ;;
        --) shift && break ;;
        *) usage >&2 && echo "bench.sh: unknown flag '$1'" >&2 && exit 2 ;;
    esac
done
extra=("$@")

IFS=, read -ra chosen <<<"${types:-$(IFS=, && echo "${all_types[*]}")}"
for type in "${chosen[@]}"; do
    if [[ " ${all_types[*]} " != *" $type "* ]]; then
        echo "bench.sh: unknown type '$type'; there are ${all_types[*]}" >&2
        exit 2
    fi
done

first_id() { awk -F'"id" *: *"' 'NF > 1 { split($2, part, "\""); print part[1]; exit }'; }
if [[ -z $model ]]; then
    listed=$(curl -fsS "http://$host:$port/v1/models") || {
        echo "bench.sh: no response from http://$host:$port; is the server up?" >&2
        exit 1
    }
    model=$(first_id <<<"$listed")
fi
output=${output:-results-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$output"
output=$(cd "$output" && pwd)

# load FILE: the name of the image in a tarball, once docker has it.
load() {
    local said name
    said=$(docker load -i "$1") || { echo "bench.sh: docker cannot load $1" >&2 && return 1; }
    name=$(sed -nE 's/^Loaded image( ID)?: *//p' <<<"$said" | head -n 1)
    [[ -n $name ]] || { echo "bench.sh: no image in $1; docker says: $said" >&2 && return 1; }
    echo "$name"
}

client=(penstock)
if [[ -n $image ]]; then
    if [[ $image == *.tar || $image == *.tar.gz || $image == *.tgz ]]; then
        [[ -f $image ]] || { echo "bench.sh: there is no file $image" >&2 && exit 1; }
        image=$(load "$image")
    fi
    cache=${HF_HOME:-$HOME/.cache/huggingface}
    mkdir -p "$cache"
    client=(docker run --rm --network host -v "$output:$output" -v "$cache:/hub" -e HF_HOME=/hub)
    if [[ -n $dataset ]]; then
        dataset=$(realpath "$dataset")
        client+=(-v "$dataset:$dataset:ro")
    fi
    client+=("$image" penstock)
fi

# run NAME FLAGS...: one benchmark, its figures in $output/NAME.json. One that fails ends no other.
num_failed=0
run() {
    local name=$1 && shift
    echo "=== $name: $model at $host:$port"
    "${client[@]}" bench serve --host "$host" --port "$port" --model "$model" \
        ${tokenizer:+--tokenizer "$tokenizer"} --backend openai --seed 42 \
        --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,95,99 \
        --save-result --result-dir "$output" --result-filename "$name.json" "$@" "${extra[@]}" ||
        { num_failed=$((num_failed + 1)) && echo "bench.sh: $name failed" >&2; }
}

# random NAME INPUT OUTPUT PROMPTS FLAGS...
random() {
    local name=$1 isl=$2 osl=$3 num=$4 && shift 4
    run "$name" --dataset-name random --random-ids --random-input-len "$isl" \
        --random-output-len "$osl" --num-prompts "$num" --ignore-eos --tokenize-on-client "$@"
}

for type in "${chosen[@]}"; do
    case $type in
        throughput) random throughput 512 256 100 ;;
        prefill)
            for isl in 128 512 1024 2048 4096; do
                random "prefill_$isl" "$isl" 1 20 --max-concurrency 4
            done
            ;;
        decode)
            for osl in 128 256 512 1024; do
                random "decode_$osl" 128 "$osl" 20 --max-concurrency 4
            done
            ;;
        latency)
            random latency_128_128 128 128 10 --max-concurrency 1
            random latency_512_256 512 256 10 --max-concurrency 1
            ;;
        concurrency)
            for level in 1 4 16 64 256; do
                random "concurrency_$level" 512 256 $((level * 5)) --max-concurrency "$level"
            done
            ;;
        sharegpt)
            source=(--download-path "$output")
            [[ -z $dataset ]] || source=(--dataset-path "$dataset")
            run sharegpt --dataset-name sharegpt --num-prompts 100 "${source[@]}"
            run sharegpt_4 --dataset-name sharegpt --num-prompts 100 --max-concurrency 4 \
                "${source[@]}"
            ;;
    esac
done
echo "results: $output"
exit $((num_failed > 0))
