#!/usr/bin/env bash
# Builds stand-ins for debian:bookworm-slim and python:3.11-slim-bookworm, for a Docker engine that reaches no image
# registry, on a Debian machine that reaches Debian's packages. They carry this machine's trust store, apt sources and
# wheels (PIP_FIND_LINKS), so that `docker build` installs packages as this machine does. For the compose test only.
# Needs root and debootstrap. A minute or two, 400 MB.
set -euo pipefail
command -v debootstrap >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
root=$(mktemp -d)
log=$(mktemp)
cleanup() { umount "$root" 2>/dev/null || true; rm -rf "$root" "$log"; }
trap cleanup EXIT
mount -t tmpfs -o mode=755 drafthouse-base "$root" 2>/dev/null || true   # dpkg waits for the disk after every file

# One tree for both names: Python is what the one has over the other, and it harms nobody there.
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$root" >"$log" 2>&1 || {
    tail -5 "$log" >&2
    exit 1
}
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
rm -f "$root/etc/apt/sources.list"
for settings in sources.list sources.list.d apt.conf.d; do
    [ ! -e "/etc/apt/$settings" ] || cp -rL "/etc/apt/$settings" "$root/etc/apt/"
done
mkdir -p "$root/usr/share/keyrings" && cp -rLn /usr/share/keyrings/. "$root/usr/share/keyrings/"
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndefault-timeout = 180\n' >"$root/etc/pip.conf"
for links in ${PIP_FIND_LINKS:-}; do
    [ -d "$links" ] || continue
    mkdir -p "$root/var/wheels" && cp -L "$links"/*.whl "$root/var/wheels/"
    echo 'find-links = /var/wheels' >>"$root/etc/pip.conf"
done
# As in the official images: no waiting for the disk in a layer that is thrown away when its build breaks off, no manuals.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/no-sync"
printf 'path-exclude /usr/share/%s/*\n' doc man locale >"$root/etc/dpkg/dpkg.cfg.d/no-manuals"
ln -s /usr/bin/python3 "$root/usr/local/bin/python"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*

tar -C "$root" -c . | docker import \
    --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
    - debian:bookworm-slim >/dev/null
docker tag debian:bookworm-slim python:3.11-slim-bookworm
