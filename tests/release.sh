#!/usr/bin/env bash
# Makes a release, all of it but the upload, and leaves it in a folder: wheel, sdist, SBOM, SHA-256
# digests, the site with all its versions, and a log. From a fresh clone of HEAD.
#   tests/release.sh [--dry-run] [--check] [--out DIR] [CASE...]
#     --dry-run   HEAD need not be the tag of a release: its version may be one in development
#     --check     look at tree, version, changelog and artefacts alone
#     --out DIR   default build/release
#     CASE        environments, as of tests/smoke_wheel.sh; default all
set -euo pipefail
cd "$(dirname "$0")/.."
dry='' check='' out=build/release cases=()
while [ $# -gt 0 ]; do
  case $1 in
  --dry-run) dry=yes ;;
  --check) check=yes ;;
  --out) shift && out=$1 ;;
  -*) sed -n '2,8s/^# \?//p' "$0" >&2 && exit 2 ;;
  *) cases+=("$1") ;;
  esac
  shift
done
refuse() { echo "release: $*" >&2 && exit 1; }
# What a dry run only mentions.
require() { [ -z "$dry" ] && refuse "$*" || echo "   of a release: $*"; }

# ---- what is released ----------------------------------------------------------------------------

[ -z "$(git status --porcelain)" ] || refuse "the tree is not clean: commit, or stash"
version=$(awk -F'"' '/^version = /{ print $2; exit }' pyproject.toml)
echo "== version $version, commit $(git rev-parse HEAD)"
for file in dpfl_jax/__init__.py:'__version__ = "%s"' CITATION.cff:'version: %s' uv.lock:'version = "%s"'; do
  # shellcheck disable=SC2059
  grep -qF "$(printf "${file#*:}" "$version")" "${file%%:*}" || refuse "${file%%:*} has another version than $version"
done
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+(rc[0-9]+)?$ ]] || require "$version is in development: set one like 1.0.0 in pyproject.toml, dpfl_jax/__init__.py, CITATION.cff and uv.lock"
[ "$(git tag --points-at HEAD "v$version")" ] || require "HEAD has no tag v$version: git tag -s v$version"
section="## $version"
grep -q "^$section\b" CHANGELOG.md || { require "CHANGELOG.md has no section '$section'" && section="## Unreleased"; }
notes=$(awk -v title="$section" '/^## /{on = index($0, title) == 1; next} on' CHANGELOG.md)
[ "$(wc -w <<<"$notes")" -ge 10 ] || refuse "the section '$section' of CHANGELOG.md is empty"
[ -f "tests/artefacts/$version/files.tar.gz" ] || refuse "tests/artefacts/$version is missing: python -m tests.artefacts"
[ -z "$check" ] || exit 0

# ---- what it is made of --------------------------------------------------------------------------

rm -rf "$out" && mkdir -p "$out/dist" && out=$(cd "$out" && pwd)
exec > >(tee "$out/release.log") 2>&1
echo "== release of dpfl_jax $version${dry:+ (dry run)}, commit $(git rev-parse HEAD), $(date -u +%FT%TZ)"
part() { local began=$SECONDS && "$@" && echo "== $((SECONDS - began)) s: $*"; }
export NO_COLOR=1
# uv looks for Pythons on the PATH; pyenv's are beside it.
for python in "$HOME"/.pyenv/versions/3.1[1-3].*/bin; do PATH=$PATH:$python; done
git clone --quiet . "$out/clone" && cd "$out/clone"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) && export SOURCE_DATE_EPOCH # the same files from the same commit
printf '%s\n' "$notes" >"$out/notes.md"
part uv build --quiet --out-dir "$out/dist"
rm -f "$out/dist/.gitignore"
part uvx --quiet twine check --strict "$out"/dist/*
part uv export --quiet --frozen --no-dev --format cyclonedx1.5 --output-file "$out/sbom.cdx.json"
part tests/smoke_wheel.sh --dist "$out/dist" "${cases[@]}"

site() { # a folder for each version that has one, with a list to choose from
  local minor=${version%.*}
  git config user.name release && git config user.email release@localhost
  git fetch --quiet origin gh-pages:gh-pages 2>/dev/null || true # versions of before
  NO_MKDOCS_2_WARNING=1 uv run --quiet --frozen --group docs --with mike \
    mike deploy --branch gh-pages --update-aliases --title "$version" "$minor" latest >/dev/null
  uv run --quiet --frozen --group docs --with mike mike set-default --branch gh-pages latest >/dev/null
  mkdir "$out/site" && git archive gh-pages | tar -x -C "$out/site"
  echo "site: $(cd "$out/site" && echo */), $(find "$out/site" -name '*.html' | wc -l) pages"
}
part site
(cd "$out" && sha256sum dist/* sbom.cdx.json | tee SHA256SUMS)
echo "== ${dry:+dry run of }dpfl_jax $version: $out"
