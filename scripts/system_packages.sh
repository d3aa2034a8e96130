#!/bin/sh
# Debian packages the tests need: a software Vulkan driver, and OpenMP for parallel kernels.
# Installs them as root; otherwise says what to install.
set -eu

missing=""
for package in mesa-vulkan-drivers libvulkan1 libgomp1; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ]; then
    echo "please install:$missing (as root: apt-get install$missing)" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
