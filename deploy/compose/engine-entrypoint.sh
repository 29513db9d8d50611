#!/bin/sh
# Starts the engine of a container. Replicas of one service share every option, but an engine's id is the label of its
# metrics and must be its own: unless one is given it is the container's host name (Kubernetes: the pod's name).
set -eu
: "${DRAFTHOUSE_ENGINE_ID:=$(hostname)}"
export DRAFTHOUSE_ENGINE_ID
exec drafthouse engine "$@"
