# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment in the checkout with this package in it.
#
#   prepare EXTRAS     e.g. prepare cpu; sets $ROOT and $PYTHON. Does nothing when that was done before.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

# The checkout's folders are called comm, runtime, ...: keep the working folder out of Python's path, so that they never
# stand in for packages of those names (Python 3.11 and later).
export PYTHONSAFEPATH=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${DSPARK_PYTHON:+"$DSPARK_PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "error: Python 3.10 or later was not found; install it, or name it: DSPARK_PYTHON=/path/to/python3"
    return 1
}

make_venv() {
    local python
    python="$(find_python)" || return 1
    say "Making a virtual environment in $VENV with $("$python" --version)"
    rm -rf "$VENV"
    if ! "$python" -m venv "$VENV" >&2 || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        rm -rf "$VENV"
        say "error: $python cannot make a virtual environment with pip in it."
        say "On Debian and Ubuntu: apt-get install python3-venv. Elsewhere: install Python's venv and ensurepip modules."
        return 1
    fi
}

# Whether an install whose stamp says $1 was made with all the extras of $2.
is_installed() {
    local wanted="$1" extras="$2" stamp extra
    for stamp in "$VENV"/installed-*; do
        if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then continue; fi
        for extra in ${extras//,/ }; do
            case ",${stamp##*/installed-}," in *",$extra,"*) ;; *) continue 2 ;; esac
        done
        return 0
    done
    return 1
}

prepare() {
    local extras="$1" wanted
    # An editable install points to this folder, so a moved checkout needs a new one.
    wanted="$(printf '%s\n' "$ROOT" && cat "$ROOT/setup.py" "$ROOT/constraints-cpu.txt")"
    if [ -x "$PYTHON" ] && is_installed "$wanted" "$extras"; then
        return
    fi
    if ! "$PYTHON" -c '' 2>/dev/null || { [ -f "$VENV/root" ] && [ "$(cat "$VENV/root")" != "$ROOT" ]; }; then
        make_venv || return 1
        printf '%s\n' "$ROOT" >"$VENV/root"
    fi
    say "Installing dspark[$extras] (PyTorch is the large part; once)"
    if ! (cd "$ROOT" && "$PYTHON" -m pip install --quiet -c constraints-cpu.txt -e ".[$extras]" >&2); then
        say "error: pip could not install dspark[$extras]; its message is above. Running this script again continues."
        return 1
    fi
    printf '%s\n' "$wanted" >"$VENV/installed-$extras"
}
