#!/usr/bin/env bash
# Overspill on a GPU machine that has PyTorch and no network, into a folder of its own.
#
#   bench/gpu_install.sh gather [WHEELS] [VERSION]   here, with a network: wheels for Python VERSION (default 3.12) on x86-64
#   bench/gpu_install.sh install [WHEELS] [TARGET]   there, with the repository and that folder; prints what to export
#
# WHEELS is build/wheels, TARGET build/gpu-site. What PyTorch's environment has already stays as it is there. Where this
# machine has a Python VERSION, Overspill comes as a wheel; where not, or where that wheel does not load there, it is built
# there from the repository, for which the folder has nanobind, scikit-build-core, cmake and ninja (a C++20 compiler is needed).
set -euo pipefail
cd "$(dirname "$0")/.."

# What Overspill needs beside PyTorch and its numpy, with what these need; then what builds it.
RUNTIME=(highspy msgspec rich typer click shellingham annotated-doc markdown-it-py mdurl pygments typing-extensions)
BUILD=(nanobind scikit-build-core packaging pathspec)
TOOLS=(cmake ninja)

python_of_version() {  # a Python of that version, or nothing
  for found in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    if "$found" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$found"
      return
    fi
  done
}

gather() {
  local wheels=$1 version=$2 python platforms=()
  for glibc in 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  for old in manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64; do platforms+=(--platform "$old"); done
  rm -rf "$wheels" && mkdir -p "$wheels"
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" -c constraints.txt -d "$wheels" "${RUNTIME[@]}" "${BUILD[@]}" "${TOOLS[@]}"
  python=$(python_of_version "$version")
  if [ -n "$python" ]; then
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
      "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$wheels" . ./packages/overspill-papers
  else
    echo "gpu_install: no Python $version here, so Overspill will be built there" >&2
  fi
  echo "$(git rev-parse HEAD)$(git diff --quiet HEAD || echo +)" > "$wheels/COMMIT"
  du -sh "$wheels"
}

install() {
  local wheels=$1 target missing=()
  rm -rf "$2" && mkdir -p "$2"
  target=$(realpath "$2")
  for wheel in "$wheels"/*.whl; do
    name=$(basename "$wheel"); name=${name%%-*}
    if [[ $name = overspill* ]] || ! has "$name"; then missing+=("$wheel"); fi
  done
  pip_into "$target" "${missing[@]}"
  if ! loads "$target"; then
    echo "gpu_install: building Overspill from the repository" >&2
    PYTHONPATH=$target PATH=$target/bin:$PATH pip_into "$target" --no-build-isolation . ./packages/overspill-papers
    loads "$target" || { echo "gpu_install: Overspill does not load; python3 -c 'import overspill.runtime.transfer._copies' says why" >&2; exit 3; }
  fi
  echo "export PYTHONPATH=$target"
}

has() { python3 -c "import importlib.metadata as m; m.version('$1')" 2>/dev/null; }
loads() { PYTHONPATH=$1 python3 -c "import highspy, msgspec, overspill.api, overspill.runtime.transfer._copies" 2>/dev/null; }
pip_into() {
  local target=$1; shift
  python3 -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --upgrade --target "$target" "$@" >&2
}

case "${1:-}" in
  gather) gather "${2:-build/wheels}" "${3:-3.12}" ;;
  install) install "${2:-build/wheels}" "${3:-build/gpu-site}" ;;
  *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | head -n -1 >&2; exit 2 ;;
esac
