"""The kernels that are compared with torch's, with a row for each way in which they compute."""

from kernels.compared import attention, convolution_gradients, convolutions, losses, norms, products

ROWS = {
    "attention in bf16": attention.IN_BF16,
    "attention in fp32": attention.IN_FP32,
    "gradient of weights in bf16": convolutions.WEIGHT_GRADIENT,
    "gradient of weights in bf16, few channels": convolutions.WEIGHT_GRADIENT_OF_FEW_CHANNELS,
    "biases of transposed convolutions": convolution_gradients.OF_BIAS,
    "gradients of depthwise convolutions in bf16": convolution_gradients.OF_DEPTHWISE,
    "gradients of groups": convolution_gradients.OF_GROUPS,
    "gradients of depthwise convolutions": convolutions.DEPTHWISE,
    "cross-entropy": losses.CROSS_ENTROPY,
    "norms of images": norms.IMAGES,
    "norms of rows": norms.ROWS,
    "RMS norms": norms.OF_RMS,
    "RMS norms in bf16": norms.OF_RMS_IN_BF16,
    "products in bf16": products.IN_BF16,
    "products in fp32": products.IN_FP32,
}
