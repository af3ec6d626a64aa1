#!/usr/bin/env bash
# Copy a recipe folder under another name, without what was measured of it. Usage: tools/new_recipe.sh NAME FROM
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
rm -rf "recipes/$name/"{__pycache__,expected.json,certificate.md,certificate.json}

# In its README.md the new name, and nothing of the old numbers. awk writes the old name, sed then replaces all.
readme=recipes/$name/README.md
if [[ -f $readme ]]; then
    awk -v name="$name" -v from="$from" '
        NR == 1 && /^# / { printf "# %s\n\nMade from `recipes/%s`:\n", name, from; next }
        /^## / { old = 0 }
        old { next }
        { print }
        /^## Expected numbers/ {
            old = 1
            print "\nNothing is recorded of this recipe yet. Of its smoke preset, `make expected RECIPE=" from "` writes the losses to"
            print "`expected.json`, and `make verify RECIPE=" from "` a comparison of all layouts to `certificate.md` and `certificate.json`.\n"
        }
        /^## Time and cost/ { old = 1; print "\nNot measured yet." }
    ' "$readme" >"$readme.new"
    sed -Ei "/^Made from /!s#\b(RECIPE=|runs/|recipes/)${from//./[.]}\b#\1$name#g" "$readme.new"
    mv "$readme.new" "$readme"
fi
printf 'made recipes/%s from recipes/%s; next: name your rows in recipes/%s/config.yaml, then make inspect RECIPE=%s PRESET=full\n' \
    "$name" "$from" "$name" "$name"
