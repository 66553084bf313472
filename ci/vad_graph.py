"""Makes ``worker/assets/silero_vad_16k.onnx`` out of the package's ``silero_vad_16k_sequence.onnx``.

The same weights in the same network, but every convolution is one matrix product over all frames of a call. The published
graphs convolve each frame by itself: four columns at a time, which is too narrow for a processor to be fast at, and five of
them where four are used. Only the sums are rounded differently. And the frames may be those of one stream, or of many: the shape of
the state says how many streams there are.

    python ci/vad_graph.py silero_vad_16k_sequence.onnx worker/assets/silero_vad_16k.onnx

Needs the package ``onnx``, which nothing else here does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BINS, UNITS = 129, 128
HOP, HOPS = 128, 5
"""Samples from window to window, and such hops in a frame: 64 samples before it, 512 of its own, 64 mirrored."""


class Graph:
    """Nodes and constants in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, values: Any) -> str:
        array = np.asarray(values)
        array = np.ascontiguousarray(array, np.int64 if array.dtype.kind == "i" else np.float32)
        self.constants.append(numpy_helper.from_array(array, f"constant{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, kind: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
        names = outputs or (f"{kind.lower()}{len(self.nodes)}",)
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names[0]

    def shape(self, x: str, *sizes: int) -> str:
        return self.add("Reshape", x, self.constant(sizes))

    def slice(self, x: str, begin: int, end: int) -> str:
        """Of the second axis."""
        return self.add("Slice", x, self.constant([begin]), self.constant([end]), self.constant([1]))

    def layer(self, x: str, weight: Any, bias: Any) -> str:
        return self.add("Relu", self.add("Gemm", x, self.constant(weight), self.constant(bias)))


def windows(g: Graph) -> str:
    """Shape ``(4 N, 256)``."""
    padded = g.add("Pad", "input", g.constant([0, 0, 0, HOP // 2]), mode="reflect")
    hops = g.shape(padded, -1, HOPS, HOP)
    return g.shape(g.add("Concat", g.slice(hops, 0, HOPS - 1), g.slice(hops, 1, HOPS), axis=2), -1, 2 * HOP)


def magnitudes(g: Graph, x: str, basis: Any) -> str:
    """Shape ``(4 N, 129)``."""
    spectrum = g.add("MatMul", x, g.constant(basis[:, 0].T))
    g.add("Split", spectrum, g.constant([BINS, BINS]), outputs=("re", "im"), axis=1)
    return g.add("Sqrt", g.add("Add", g.add("Mul", "re", "re"), g.add("Mul", "im", "im")))


def first_layer(g: Graph, x: str, weight: Any, bias: Any) -> str:
    """A convolution over three windows that gives one value for each; shape ``(N, 4 · 128)``."""
    around = g.add("Pad", g.shape(x, -1, 4, BINS), g.constant([0, 1, 0, 0, 1, 0]))
    near = g.add("Concat", *(g.slice(around, tap, tap + 4) for tap in range(3)), axis=2)
    columns = g.layer(g.shape(near, -1, 3 * BINS), weight.transpose(2, 1, 0).reshape(3 * BINS, -1), bias)
    return g.shape(columns, -1, 4 * UNITS)


def second_layer(g: Graph, x: str, weight: Any, bias: Any) -> str:
    """The same in steps of two windows, with zeros where a window is out of reach: the product is small."""
    out, channels, taps = weight.shape
    dense = np.zeros((4, channels, 2, out), np.float32)
    for step in range(2):
        for tap in range(taps):
            if 0 <= 2 * step + tap - 1 < 4:
                dense[2 * step + tap - 1, :, step] = weight[:, :, tap].T
    return g.layer(x, dense.reshape(4 * channels, 2 * out), np.tile(bias, 2))


def frames_of_streams(source: Any) -> Any:
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in source.graph.initializer}
    (lstm,) = (node for node in source.graph.node if node.op_type == "LSTM")

    def of(layer: str) -> tuple[Any, Any]:
        return weights[f"{layer}.weight"], weights[f"{layer}.bias"]

    g = Graph()
    x = magnitudes(g, windows(g), weights["stft.forward_basis_buffer"])
    x = second_layer(g, first_layer(g, x, *of("encoder.0")), *of("encoder.1"))
    weight, bias = of("encoder.2")
    x = g.layer(x, np.concatenate([weight[:, :, 1].T, weight[:, :, 2].T]), bias)  # two steps left; padding before them
    weight, bias = of("encoder.3")
    x = g.layer(x, weight[:, :, 1].T, bias)  # one step left; padding on both sides
    gates = (g.constant(weights[name]) for name in lstm.input[1:4])
    streams = g.add("Slice", g.add("Shape", "h"), g.constant([1]), g.constant([2]))
    sequence = g.add("Reshape", x, g.add("Concat", g.constant([-1]), streams, g.constant([UNITS]), axis=0))
    g.add("LSTM", sequence, *gates, "", "h", "c", outputs=("hidden", "hn", "cn"), hidden_size=UNITS)
    weight, bias = of("output")
    x = g.add("Relu", g.shape("hidden", -1, UNITS))
    x = g.add("Sigmoid", g.add("Gemm", x, g.constant(weight.reshape(UNITS, 1)), g.constant(bias)))
    g.add("Reshape", x, g.constant([-1]), outputs=("speech_probs",))

    def tensor(name: str, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    state = [1, "streams", UNITS]
    graph = helper.make_graph(
        g.nodes,
        "silero_vad_16k",
        [tensor("input", "frames", HOP * 4 + HOP // 2), tensor("h", *state), tensor("c", *state)],
        [tensor("speech_probs", "frames"), tensor("hn", *state), tensor("cn", *state)],
        g.constants,
    )
    opsets = [helper.make_opsetid("", 16)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=source.ir_version)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    made = frames_of_streams(onnx.load(str(source)))
    onnx.checker.check_model(made, full_check=True)
    target.write_bytes(made.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
