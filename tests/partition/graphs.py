"""Families of graphs, made up: chains with skips, encoder and decoder, operators of transformers, random ones."""

import random

from megatron.partition import Graph, parse_graph


def content(times, edges, *, devices=2, memory=1e12, out=1000, **more):
    """A graph file's content. `times`: forward and backward milliseconds of each node, together."""
    nodes = [
        {
            "id": i, "scope": f"M/Block[{i}]", "block": "Block", "fwd_ms": time / 4, "bwd_ms": time * 3 / 4,
            "params": 1000, "mem_bytes": 100, "out_bytes": out,
        }
        for i, time in enumerate(times)
    ]  # fmt: skip
    return {
        "nodes": nodes, "edges": [list(edge) for edge in edges], "num_devices": devices,
        "bandwidth_gigabytes_per_second": 12, "memory_limit_bytes": memory, "weight_bytes_per_parameter": 4,
        "special_block": "Block",
    } | more  # fmt: skip


def random_dag(seed, *, size=40, devices=4, out=1_000_000, speeds=()) -> Graph:
    """A chain with jumps ahead, and times that spread over two magnitudes."""
    rng = random.Random(seed)
    edges = {(i, i + 1) for i in range(size - 1) if rng.random() < 0.9}
    edges |= {tuple(sorted(rng.sample(range(size), 2))) for _ in range(size // 2)}
    times = [10 ** rng.uniform(-0.5, 1.5) for _ in range(size)]
    made = content(times, sorted(edges), devices=devices, out=out)
    made["devices"] = [{"memory_limit_bytes": 1e12, "speed": speed} for speed in speeds]
    return parse_graph(made)


def chain_with_skips(seed, *, size=60, every=7, devices=4) -> Graph:
    rng = random.Random(seed)
    edges = [(i, i + 1) for i in range(size - 1)] + [(i, i + every) for i in range(0, size - every, every)]
    return parse_graph(content([rng.uniform(1, 20) for _ in range(size)], edges, devices=devices, out=2_000_000))


def encoder_decoder(*, layers=24, ratio=5.5, devices=8, fits=0.7) -> Graph:
    """Equal memory in each layer, and encoders `ratio` times as slow (section 3.3); a device fills to `fits`."""
    times = [ratio * 10] * layers + [10] * layers
    edges = [(i, i + 1) for i in range(2 * layers - 1)] + [(layers - 1, i) for i in range(layers + 1, 2 * layers)]
    made = content(times, edges, devices=devices, out=4_000_000, memory=4100 * 2 * layers / devices / fits)
    for node in made["nodes"]:
        node["block"] = "Encoder" if node["id"] < layers else "Decoder"
        node["scope"] = f"M/{node['block']}[{node['id'] % layers}]"
    return parse_graph(made)


def operators(*, layers=12, devices=4, seed=0, out=3_000_000) -> Graph:
    """A transformer by operators: norm, q, k, v, scores, values, projection, residual, and an MLP."""
    rng, times, edges, scopes = random.Random(seed), [1.0], [], ["M/Embedding"]
    last = 0
    for layer in range(layers):
        first = len(times)
        norm, q, k, v, scores, values, proj, add, norm2, up, act, down, add2 = range(first, first + 13)
        edges += [(last, norm), (norm, q), (norm, k), (norm, v), (q, scores), (k, scores), (scores, values)]
        edges += [(v, values), (values, proj), (proj, add), (last, add), (add, norm2), (norm2, up), (up, act)]
        edges += [(act, down), (down, add2), (add, add2)]
        times += [t * rng.uniform(0.9, 1.1) for t in (0.1, 2, 2, 2, 1.5, 1.2, 2, 0, 0.1, 8, 0.3, 8, 0)]
        scopes += [f"M/Block[{layer}]/op{i}" for i in range(13)]
        last = add2
    edges.append((last, len(times)))
    times.append(9.0)
    made = content(times, edges, devices=devices, out=out)
    for node, scope in zip(made["nodes"], [*scopes, "M/Head"], strict=True):
        node["scope"], node["block"] = scope, "Block" if "Block" in scope else ""
    return parse_graph(made)
