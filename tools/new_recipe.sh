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
    fail "NAME=$name: give a folder name of letters, digits, '.', '_' and '-' that begins with a letter or digit"
[[ $from =~ ^[A-Za-z0-9] && $from != */* && -f recipes/$from/launch.sh ]] || fail "FROM=$from: no such recipe"
[[ ! -e recipes/$name ]] || fail "recipes/$name exists already"
cp -r "recipes/$from" "recipes/$name"
rm -rf "recipes/$name/__pycache__"
printf 'made recipes/%s from recipes/%s; next: edit recipes/%s/config.yaml, then make train RECIPE=%s\n' \
    "$name" "$from" "$name" "$name"
