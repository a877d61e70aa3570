"""Cut of convolutional networks by the positions of their images: the layers that a plan lists exchange halos, and all
other code of a module must compute each position on its own.

- `part`, `positions`, `places`: parts of images as tensors, and the functions that may be applied to them
- `escapes`: the first forward pass, in which code that computes with parts unseen is refused
- `rules`, `layers`: styles of a plan for layers over images, and the `forward` of each style
- `messages`: forecasts of the messages of a plan
"""
