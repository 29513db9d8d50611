#!/usr/bin/env bash
# Builds stand-ins for debian:bookworm-slim and python:3.11-slim-bookworm, for a Docker engine that reaches no image
# registry, on a Debian machine that reaches Debian's packages. They carry this machine's trust store, apt sources and
# wheels (PIP_FIND_LINKS), so that `docker build` installs packages as this machine does. For the compose test only.
# Needs root and debootstrap. A few minutes, 400 MB.
set -euo pipefail
command -v debootstrap >/dev/null || apt-get install -y --no-install-recommends debootstrap
root=$(mktemp -d)
build=$(mktemp -d)
trap 'rm -rf "$root" "$build"' EXIT

debootstrap --variant=minbase --include=ca-certificates bookworm "$root" >"$build/log" 2>&1 || { tail -5 "$build/log" >&2; exit 1; }
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
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" -c . | docker import - debian:bookworm-slim >/dev/null

cat >"$build/Dockerfile" <<'D'
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/python3 /usr/local/bin/python
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
D
DOCKER_BUILDKIT=0 docker build -q -t python:3.11-slim-bookworm "$build"
