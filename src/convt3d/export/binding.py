"""The binding of an exported file: PyTorch's tensors in, the launcher's pointers and extents out.

Both kinds of layers have one text. What differs is how extents and the weight's channels go
together, and which operands the kernels of an operation take for its own (``operations.py``).
"""

from __future__ import annotations

from string import Template

from convt3d.export.header import convolution
from convt3d.export.layer import Layer
from convt3d.export.operations import operation_of
from convt3d.export.pieces import template
from convt3d.export.variants import arithmetics

_TRANSPOSED = {
    "output_size": """\
  for (int i = 0; i < 3; ++i)
    size[i] = (input[i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel_size[i] - 1) +
              output_padding[i] + 1;""",
    "weight_channels": "in_channels, out_channels / groups",
    "weight_operands": "input, result, gradient",
    "parameters": "stride, padding, output_padding, groups, dilation",
    "operands": """\
// source -> target: input -> output; output gradient -> input gradient. The gradient by weight
// reads input and output gradient (source, target) and writes weight.""",
}
_CONV = {
    "output_size": """\
  for (int i = 0; i < 3; ++i) {
    const int64_t room = input[i] + 2 * padding[i] - dilation[i] * (kernel_size[i] - 1) - 1;
    size[i] = room < 0 ? 0 : room / stride[i] + 1;
  }""",
    "weight_channels": "out_channels, in_channels / groups",
    "weight_operands": "gradient, result, input",
    "parameters": "stride, padding, dilation, groups",
}
_OPERANDS = """\
// source -> target: input -> output; output gradient -> input gradient. The gradient by weight
// reads output gradient and input (source, target) and writes weight. Kernels are those of the
// transposed convolution with the same weight, whose input has the extents of this one's output"""
_FLIPPED_OPERANDS = f"""{_OPERANDS};
// those of the forward pass are of one with the flipped weight, whose input is this one's."""
_FLIPPED = """\
/// The weight as the forward pass reads it, which runs as a transposed convolution: by strides, its
/// channels are exchanged and its taps in reverse.
host::Tensors flipped(const host::Tensors& t) {
  const auto last = (kernel_size[0] - 1) * t.weight_stride_d +
                    (kernel_size[1] - 1) * t.weight_stride_h +
                    (kernel_size[2] - 1) * t.weight_stride_w;
  return {t.source, t.weight + last, t.bias, t.target, t.weight_stride_out, t.weight_stride_in,
          -t.weight_stride_d, -t.weight_stride_h, -t.weight_stride_w};
}

"""


def declarations(layer: Layer) -> str:
    """What the launcher offers."""
    return Template(template("declarations.h")).substitute(_words(layer))


def binding(layer: Layer, only: bool, elsewhere: bool) -> str:
    """The binding.

    Args:
        only: the kernels run the problem's own extents alone.
        elsewhere: with a function that calls PyTorch's operator.
    """
    values = {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in layer.geometry.to_dict().items()
    }
    values["output_padding"] = (
        f"constexpr Size output_padding = {{{values['output_padding']}}};\n"
        if layer.geometry.transposed
        else ""
    )
    dense = "return tensor.contiguous();"
    if only:
        dense = (
            "const Tensor dense = tensor.contiguous();\n"
            "  // Tensor maps and vectors begin at multiples of 16 bytes.\n"
            "  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % 16 ? dense.clone() : dense;"
        )
    text = template("binding.cpp") + (template("elsewhere.cpp") if elsewhere else "")
    return Template(text).substitute(values, dense=dense, **_words(layer))


def _words(layer: Layer) -> dict[str, str]:
    """What both kinds of layers say each in its way."""
    function = layer.function
    words = {
        "function": function,
        "indent": " " * len(function),
        "convolution": convolution(layer),
        "output_tensors": "tensors_of(input, weight, output)",
        "flipped": "",
    }
    if layer.geometry.transposed:
        return words | _TRANSPOSED | {"output_extents": "in, out", "gradient_extents": "in, out"}
    words |= _CONV | {"output_extents": "out, in", "gradient_extents": "out, in"}
    output = operation_of(layer, "forward", arithmetics(layer, "problem")[0])
    words["operands"] = f"{_OPERANDS}."
    if output.flipped:
        words |= {"flipped": _FLIPPED, "output_extents": "in, out"}
        words["output_tensors"] = "flipped(tensors_of(input, weight, output))"
        words["operands"] = _FLIPPED_OPERANDS
    return words
