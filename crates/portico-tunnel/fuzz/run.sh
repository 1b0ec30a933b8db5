#!/usr/bin/env bash
# Runs the fuzz targets of this crate for SECONDS each (default 30). fuzz/run.sh at the root says how.
exec "$(dirname "$0")/../../../fuzz/run.sh" "${1:-30}" portico-tunnel
