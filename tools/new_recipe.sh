#!/usr/bin/env bash
# Copy a recipe folder under another name. Usage: tools/new_recipe.sh NAME FROM
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=${1:-} from=${2:-}
fail() {
    printf 'new-recipe: %s\n' "$*" >&2
    exit 2
}
[[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    fail "NAME=$name: give a folder name of letters, digits, '.', '_' and '-' that begins with a letter or digit," \
        "as in: make new-recipe NAME=mine FROM=qwen3_vl"
[[ $from =~ ^[A-Za-z0-9] && $from != */* && -f recipes/$from/launch.sh ]] || {
    legal=(recipes/[A-Za-z0-9]*/launch.sh)
    legal=("${legal[@]%/launch.sh}")
    fail "FROM=$from: no such recipe (legal: ${legal[*]#recipes/})"
}
[[ ! -e recipes/$name ]] || fail "recipes/$name exists already"
cp -r "recipes/$from" "recipes/$name"
rm -rf "recipes/$name/__pycache__"
printf 'made recipes/%s from recipes/%s; next: name your rows in recipes/%s/config.yaml, then make inspect RECIPE=%s PRESET=full\n' \
    "$name" "$from" "$name" "$name"
