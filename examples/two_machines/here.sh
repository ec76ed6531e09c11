#!/usr/bin/env bash
# Two machines on this one: network namespaces with an address each and a cable between.
# Needs Linux, root and iproute2.
set -euo pipefail

names=("fsdp-first-$$" "fsdp-second-$$")
addresses=(192.0.2.1 192.0.2.2)

remove() {
    kill "${torchruns[@]}" 2>/dev/null || true
    for name in "${names[@]}"; do ip netns delete "$name" 2>/dev/null || true; done
}
torchruns=()
trap remove EXIT

for name in "${names[@]}"; do ip netns add "$name"; done
ip link add cable netns "${names[0]}" type veth peer name cable netns "${names[1]}"
for machine in 0 1; do
    ip -n "${names[$machine]}" address add "${addresses[$machine]}/24" dev cable
    ip -n "${names[$machine]}" link set lo up
    ip -n "${names[$machine]}" link set cable up
done

# What is started on each machine. gloo and torchrun would look for the interface by the
# host's name, which is one here.
export GLOO_SOCKET_IFNAME=cable OMP_NUM_THREADS=1
for machine in 0 1; do
    ip netns exec "${names[$machine]}" torchrun \
        --nnodes 2 --nproc-per-node "${RANKS:-2}" \
        --rdzv-backend c10d --rdzv-endpoint "${addresses[0]}:29400" \
        --rdzv-conf "is_host=$((1 - machine))" --local-addr "${addresses[$machine]}" \
        "$(dirname "$0")/train.py" &
    torchruns+=($!)
done
wait "${torchruns[0]}"
wait "${torchruns[1]}"
torchruns=()
