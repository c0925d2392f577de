#!/bin/sh
# Build the images without Docker and without pulling anything: Debian's debootstrap makes the base,
# buildah builds, podman and runc run. As root on Debian or Ubuntu:
#
#   apt-get install debootstrap buildah podman runc
#   scripts/try_images.sh kvcache balancer gateway engine-cpu stores
#
# Images are called localhost/inferfleet-<target>:try; `stores` has Debian's Redis and etcd.
# pip's configuration of this machine (mirror, certificates) is lent to the builds, not kept in them.
set -eu
cd "$(dirname "$0")/.."

base=localhost/inferfleet-base:try

for tool in debootstrap buildah podman runc; do
  command -v "$tool" >/dev/null || { echo "try_images: $tool is missing: apt-get install $tool" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "try_images: debootstrap needs root" >&2; exit 1; }
[ $# -gt 0 ] || { echo "usage: try_images.sh TARGET..." >&2; exit 2; }

mirror() {
  [ -z "${DEBIAN_MIRROR:-}" ] || { echo "$DEBIAN_MIRROR"; return; }
  awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/*.sources 2>/dev/null | grep . ||
    awk '$1 == "deb" {for (i = 2; i <= NF; i++) if ($i ~ "^https?:") {print $i; exit}}' \
      /etc/apt/sources.list /etc/apt/sources.list.d/*.list
}

make_base() {
  scratch=$(mktemp -d)
  echo "Making $base with debootstrap"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    bookworm "$scratch/base" "$(mirror)" >"$scratch/log" 2>&1 || { tail "$scratch/log" >&2; exit 1; }
  rm -rf "$scratch"/base/var/cache/apt/archives/*.deb
  tar -C "$scratch/base" -c . | podman import - "$base" >/dev/null
  rm -rf "$scratch"
}

# pip's whole configuration here as one file, and the files and folders it names, as -v options.
volumes() {
  python3 -m pip config list 2>/dev/null | grep '^global' | sed 's/^global\.//; s/^/ /' |
    { echo '[global]'; sed "s/^ \([a-z-]*\)='\(.*\)'$/\1 = \2/"; } >"$pip_conf"
  echo "-v $pip_conf:/etc/pip.conf:ro"
  for path in $(grep -o "[ /]/[A-Za-z0-9_/.-]*" "$pip_conf" | sed 's#^ ##; s#^//*#/#; s#/simple$##' | sort -u); do
    [ ! -e "$path" ] || echo "-v $path:$path:ro"
  done
}

pip_conf=$(mktemp)
trap 'rm -f "$pip_conf"' EXIT
podman image exists "$base" || make_base
for target in "$@"; do
  echo "Building $target"
  if [ "$target" = stores ]; then
    file=$(mktemp)
    printf 'FROM %s\nRUN apt-get update && apt-get install -y --no-install-recommends redis-server redis-tools etcd-server etcd-client && rm -rf /var/lib/apt/lists/*\n' "$base" >"$file"
    context=$(mktemp -d)
    mv "$file" "$context/Dockerfile"
    buildah --isolation chroot bud -q --layers --format docker -t localhost/inferfleet-stores:try "$context"
    rm -r "$context"
    continue
  fi
  # shellcheck disable=SC2046 # options, to be split
  buildah --isolation chroot bud -q --layers --format docker --target "$target" $(volumes) \
    --build-arg BASE_IMAGE="$base" --build-arg TORCH_INSTALL="${TORCH_INSTALL:-pip}" \
    --build-arg MODEL_PACKAGE="${MODEL_PACKAGE:-}" -t "localhost/inferfleet-$target:try" .
done
