#!/usr/bin/env bash
# Writes the rules of deploy/monitoring into a PrometheusRule: one source, two forms. Run it after changing them; a test
# holds the two equal.
set -euo pipefail
cd "$(dirname "$0")"
{
    cat <<'HEAD'
# Made from deploy/monitoring/rules.yml by update-rules.sh.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: drafthouse
  labels:
    app.kubernetes.io/name: drafthouse
spec:
HEAD
    sed -e 's/^\(.\)/  \1/' ../monitoring/rules.yml
} > components/monitoring/prometheus-rule.yaml
