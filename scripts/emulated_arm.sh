#!/usr/bin/env bash
# Runs a command in an emulated aarch64 system with Python, torch, the wheel of `make wheel` and the tests:
#     scripts/emulated_arm.sh python3 -m pytest tests/loops
# `--missing` prints the requirement that this machine lacks, or nothing.
#
# The system is in .arm: Debian's packages are unpacked there, not installed. QEMU runs its programs in a separate
# namespace, so that the machine is unchanged. This requires Linux 6.7 or later, but not root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arm=$PWD/.arm
root=$arm/root

# Like Neoverse V1, with 32-byte vectors. torch mistakes QEMU's SME for SME2, and crashes with an illegal instruction.
cpu=max,sme=off,sve-default-vector-length=32
features="fp asimd atomics fphp asimdhp asimddp sve i8mm bf16 svebf16"

# A namespace in which this user is root, with its own binfmt_misc registrations.
separate=(unshare --user --map-root-user --mount --pid --fork --kill-child)
own_formats="mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc"

missing() {
  local program
  for program in apt-get dpkg-deb unshare chroot aarch64-linux-gnu-gcc; do
    PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || { echo "there is no $program"; return; }
  done
  "${separate[@]}" sh -c "$own_formats" 2>/dev/null || echo "Linux gives a namespace no binfmt_misc of its own (6.7 does)"
}

# Unpacks Debian's Python for aarch64 with its dependencies, and QEMU for this machine.
unpack_debian() {
  local here apt
  here=$(dpkg --print-architecture)
  mkdir -p "$arm"/apt/{lists/partial,archives/partial}
  : >"$arm/apt/status" # nothing is installed
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o "APT::Architectures::=$here"
    -o "Dir::State=$arm/apt" -o "Dir::State::status=$arm/apt/status" -o "Dir::Cache=$arm/apt" -o Debug::NoLocking=1
    -o APT::Sandbox::User=root)
  "${apt[@]}" update
  "${apt[@]}" --download-only --no-install-recommends -y install python3 libstdc++6 dash "qemu-user-static:$here" >/dev/null
  mkdir -p "$root" "$arm/qemu"
  for package in "$arm"/apt/archives/*.deb; do
    case $package in
      */qemu-user-static_*) dpkg-deb -x "$package" "$arm/qemu" ;;
      *) dpkg-deb -x "$package" "$root" ;;
    esac
  done
  rm -rf "$arm/apt"
}

# Installs wheels for aarch64 for that Python, with this machine's pip.
install_wheels() {
  "${PYTHON:-python3}" -m pip install -qq --progress-bar off --disable-pip-version-check --upgrade --no-deps \
    --only-binary=:all: --implementation cp --python-version "$version" --target "$packages" \
    $(printf -- '--platform manylinux%s_aarch64 ' _2_28 _2_27 _2_17 2014) "$@"
}

# Writes a /proc/cpuinfo for the emulated processor, which replaces the host's.
describe_processor() {
  local processor
  for processor in $(seq 0 $(($(nproc) - 1))); do
    printf 'processor\t: %s\nFeatures\t: %s\n' "$processor" "$features"
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd40\nCPU revision\t: 1\n\n'
  done
}

if [ "${1-}" = --missing ]; then
  missing
  exit
fi
lack=$(missing)
[ -z "$lack" ] || { echo "$0 cannot run: $lack" >&2; exit 1; }

if ! [ "$arm/debian" -nt "$0" ]; then
  echo "Setting up an emulated aarch64 system in .arm: one to two minutes, 1 GB"
  rm -rf "$arm"
  unpack_debian
  touch "$arm/debian"
fi
version=$(basename "$(echo "$root"/usr/bin/python3.[0-9]*)" | sed 's/^python//')
packages=$root/usr/local/lib/python$version/dist-packages
if ! [ "$arm/packages" -nt requirements/arm.txt ]; then
  grep -v '^torch==' requirements/default.txt >"$arm/constraints.txt" # torch's CPU build for aarch64 is older
  rm -rf "$packages"
  install_wheels -r requirements/arm.txt -c "$arm/constraints.txt"
  touch "$arm/packages"
fi
rm -rf "$packages"/nano_loop*
install_wheels dist/nano_loop-*_aarch64.whl
rm -rf "$root/checkout"
mkdir -p "$root"/{checkout,proc,sys,dev,tmp}
cp -r tests setup.cfg "$root/checkout"
describe_processor >"$root/cpuinfo"

enter=$(cat <<'INNER'
  # The start of ELF files for aarch64.
  magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  echo ":aarch64:M::$magic:$mask:$QEMU:F" >/proc/sys/fs/binfmt_misc/register
  mount -t proc proc "$ROOT/proc"
  mount --bind "$ROOT/cpuinfo" "$ROOT/proc/cpuinfo"
  mount --rbind /sys "$ROOT/sys"
  mount --rbind /dev "$ROOT/dev"
  mount -t tmpfs tmpfs "$ROOT/tmp"
  ulimit -c 0
  chroot "$ROOT" /bin/sh -c 'cd /checkout && exec "$@"' "$@" || exit # not as process 1, which cannot kill itself with a signal
INNER
)
# Waiting threads should sleep, because there are more threads than cores.
exec env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/tmp USER=tester LANG=C.UTF-8 OMP_WAIT_POLICY=passive \
  "QEMU_CPU=$cpu" ${NANO_LOOP_KERNELS:+"NANO_LOOP_KERNELS=$NANO_LOOP_KERNELS"} \
  ROOT="$root" QEMU="$arm/qemu/usr/bin/qemu-aarch64-static" \
  "${separate[@]}" bash -ec "$own_formats
$enter" bash sh "$@"
