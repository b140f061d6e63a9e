#!/usr/bin/env bash
# Eight requests that every OpenAI-compatible server must answer. Exits with 1 if one of them fails.
set -uo pipefail

usage() {
    cat <<'END'
usage: test.sh [-H HOST] [-p PORT] [-m MODEL]

  -H HOST   server (default: localhost)
  -p PORT   its port (default: 8000)
  -m MODEL  model (default: the first one the server lists)
END
}

host=localhost port=8000 model=''
while getopts 'H:p:m:h' flag; do
    case $flag in
        H) host=$OPTARG ;;
        p) port=$OPTARG ;;
        m) model=$OPTARG ;;
        h) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
done
url=http://$host:$port
num_passed=0 num_failed=0

first_id() { awk -F'"id" *: *"' 'NF > 1 { split($2, part, "\""); print part[1]; exit }'; }
get() { curl -fsS --max-time 30 "$url$1" 2>&1; }
post() { curl -fsS --max-time 300 -H 'Content-Type: application/json' -d "$2" "$url$1" 2>&1; }

# check NAME PATTERN COUNT REPLY: at least COUNT places of the reply match.
check() {
    local found
    found=$(grep -oE "$2" <<<"$4" | wc -l)
    if ((found >= $3)); then
        num_passed=$((num_passed + 1))
        echo "PASS  $1"
    else
        num_failed=$((num_failed + 1))
        echo "FAIL  $1: ${4:0:300}"
    fi
}

if get /health >/dev/null; then health=ok; else health=$(get /health); fi
check 'health' '^ok$' 1 "$health"

listed=$(get /v1/models)
check 'models' '"id" *: *"' 1 "$listed"
model=${model:-$(first_id <<<"$listed")}

text='"text" *: *"'
check 'completion' "$text" 1 "$(post /v1/completions \
    '{"model": "'"$model"'", "prompt": "The capital of France is", "max_tokens": 16}')"
chat='"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16'
check 'chat' '"role" *: *"assistant"' 1 "$(post /v1/chat/completions \
    '{"model": "'"$model"'", '"$chat"'}')"
check 'temperature and top_p' '"role" *: *"assistant"' 1 "$(post /v1/chat/completions \
    '{"model": "'"$model"'", '"$chat"', "temperature": 0.7, "top_p": 0.9}')"
check 'streaming' '^data:' 2 "$(post /v1/chat/completions \
    '{"model": "'"$model"'", '"$chat"', "stream": true}')"
check 'stop sequence' '"finish_reason" *: *"' 1 "$(post /v1/completions \
    '{"model": "'"$model"'", "prompt": "1, 2, 3,", "max_tokens": 32, "stop": ["7"]}')"
check 'two prompts in one request' "$text" 2 "$(post /v1/completions \
    '{"model": "'"$model"'", "prompt": ["One", "Two"], "max_tokens": 8}')"

echo "Results: $num_passed passed, $num_failed failed"
exit $((num_failed > 0))
