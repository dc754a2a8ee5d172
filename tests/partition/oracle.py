"""The objective and the rules of a partition, written as slowly and plainly as can be, from the file's content."""


def price(content, stage_of_node, device_of_stage):
    """Objective in ms, or None where it is no partition."""
    nodes = {node["id"]: node for node in content["nodes"]}
    computing = [i for i in nodes if not nodes[i].get("input")]
    num = content["num_devices"]
    limits = [d["memory_limit_bytes"] for d in content.get("devices", [])] or [content["memory_limit_bytes"]] * num
    speeds = [d.get("speed", 1) for d in content.get("devices", [])] or [1] * num
    sends = []  # producer, consumer, bytes, which tensor
    for a, b in content["edges"]:
        if not nodes[a].get("input"):
            sends.append((a, b, nodes[a]["out_bytes"], ("out", a)))
    for number, shared in enumerate(content.get("shared_parameters", [])):
        owner = first_of(content, shared["nodes"])
        sends += [(owner, b, shared["out_bytes"], ("shared", number)) for b in shared["nodes"] if b != owner]

    follows = {
        s: {stage_of_node[b] for a, b, *_ in sends if stage_of_node[a] == s} - {s} for s in set(stage_of_node.values())
    }
    for start in follows:
        reached, frontier = set(), set(follows[start])
        while frontier:
            reached |= frontier
            frontier = {t for s in frontier for t in follows[s]} - reached
        if start in reached:
            return None
    compute, memory = [0.0] * num, [0.0] * num
    for i in computing:
        last = not follows[stage_of_node[i]] and "fwd_plain_ms" in nodes[i]
        device, kind = device_of_stage[stage_of_node[i]], "plain_" if last else ""
        compute[device] += (nodes[i][f"fwd_{kind}ms"] + nodes[i][f"bwd_{kind}ms"]) / speeds[device]
        memory[device] += nodes[i][f"mem_{kind}bytes"] + nodes[i]["params"] * content["weight_bytes_per_parameter"]
    for shared in content.get("shared_parameters", []):
        for device in range(num):
            if any(device_of_stage[stage_of_node[i]] == device for i in shared["nodes"]):
                memory[device] += shared["params"] * content["weight_bytes_per_parameter"]
    if any(used > limit for used, limit in zip(memory, limits, strict=True)):
        return None
    worst = 0.0
    for s, device in enumerate(device_of_stage):
        moved = {(tensor, stage_of_node[b]): size for a, b, size, tensor in sends
                 if stage_of_node[a] == s and device_of_stage[stage_of_node[b]] != device}  # fmt: skip
        milliseconds = sum(moved.values()) / content["bandwidth_gigabytes_per_second"] / 1e9 * 1e3
        c = compute[device]
        worst = max(worst, c + max(0, milliseconds - c) + max(0, milliseconds - c))
    return worst


def first_of(content, users):
    """The first of some nodes when the earliest ready node in the file always goes next."""
    done, waiting = [], [node["id"] for node in content["nodes"]]
    while waiting:
        ready = next(i for i in waiting if all(a in done for a, b in content["edges"] if b == i))
        waiting.remove(ready)
        done.append(ready)
    return next(i for i in done if i in users)
