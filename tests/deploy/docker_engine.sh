#!/usr/bin/env bash
# Sees to a Docker engine for the compose test: uses the one that answers, else, as root on Debian, installs and starts one.
# Where that is impossible it says why and exits 0: the test then skips with its own reason.
set -euo pipefail
if docker info >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Docker engine answers, and only root on Debian can install one here" >&2
    exit 0
fi
if ! command -v dockerd >/dev/null || ! command -v docker-compose >/dev/null || ! command -v iptables >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends docker.io docker-compose iptables >/dev/null || {
        echo "docker.io and docker-compose cannot be installed here" >&2
        exit 0
    }
fi
log=$(mktemp --suffix=-dockerd.log)
echo "starting dockerd, log in $log" >&2
setsid dockerd >"$log" 2>&1 </dev/null &
for _ in $(seq 60); do
    if docker info >/dev/null 2>&1; then exit 0; fi
    sleep 0.5
done
echo "dockerd does not start:" >&2
tail -3 "$log" >&2
