#!/bin/sh
# gzip, a schema, a tool and CORS with curl: sh examples/curl/session.sh [base URL]
# Needs curl and gzip, and a gateway's HTTP address, e.g. from `inferfleet up`.
# The last step needs `inferfleet up --set gateway.cors_origins=https://chat.example.com`.
set -eu
BASE=${1:-http://127.0.0.1:8080}
ORIGIN=${2:-https://chat.example.com}
CHAT="$BASE/v1/chat/completions"
MODEL=$(curl -sSf "$BASE/v1/models" | sed 's/.*"data":\[{"id":"\([^"]*\)".*/\1/')
case $MODEL in
'' | *'{'*)
  echo "no model at $BASE" >&2
  exit 1
  ;;
esac

ask() { # name of the step, then curl's arguments
  name=$1
  shift
  printf '%s: ' "$name"
  curl -sS --fail-with-body -H 'Content-Type: application/json' "$@" "$CHAT"
  echo
}

# A compressed body.
printf '{"model": "%s", "temperature": 0, "max_tokens": 16,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}' "$MODEL" |
  gzip | ask gzip -H 'Content-Encoding: gzip' --data-binary @-

# An answer that keeps to a JSON Schema.
ask schema -d '{"model": "'"$MODEL"'", "temperature": 0, "max_tokens": 128,
  "messages": [{"role": "user", "content": "Where is the Eiffel Tower?"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema":
    {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}},
     "required": ["city"], "additionalProperties": false}}}}'

# A call that is enforced.
ask tool -d '{"model": "'"$MODEL"'", "temperature": 0, "max_tokens": 128, "tool_choice": "required",
  "parallel_tool_calls": false,
  "messages": [{"role": "user", "content": "How warm is it in the kitchen?"}],
  "tools": [{"type": "function", "function": {"name": "read_temperature", "parameters":
    {"type": "object", "properties": {"room": {"enum": ["kitchen", "cellar"]}},
     "required": ["room"], "additionalProperties": false}}}]}'

# What a browser asks before a page of $ORIGIN may call.
printf 'cors: '
curl -sS --fail-with-body -o /dev/null -D - -X OPTIONS "$CHAT" -H "Origin: $ORIGIN" \
  -H 'Access-Control-Request-Method: POST' -H 'Access-Control-Request-Headers: content-type' |
  tr -d '\r' | sed -n 's/^access-control-allow-origin: //p'
