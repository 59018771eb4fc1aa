#!/usr/bin/env bash
# Fetches prebuilt llama.cpp libraries for `llm gemma-coreml bench --against llama.cpp` and prints their directory.
#
#     scripts/fetch_llamacpp.sh [TARGET_FOLDER]
#
# Needs npm. The libraries come from the npm packages @node-llama-cpp/{linux-x64,linux-arm64,mac-arm64-metal,mac-x64}.
set -euo pipefail
version=3.22.1
target=${1:-llamacpp}
case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) platform=linux-x64 ;;
    Linux-aarch64) platform=linux-arm64 ;;
    Darwin-arm64) platform=mac-arm64-metal ;;
    Darwin-x86_64) platform=mac-x64 ;;
    *) echo "No prebuilt libraries are known for $(uname -s) on $(uname -m)." >&2; exit 1 ;;
esac
mkdir -p "$target"
npm install --prefix "$target" --no-save --ignore-scripts --force --silent "@node-llama-cpp/$platform@$version" >&2
ls -d "$target/node_modules/@node-llama-cpp/$platform/bins/"*/
