#include "device/kernels/image.h"

__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    "rejoin_kernel_image:\n"
    ".incbin \"" REJOIN_KERNEL_IMAGE
    "\"\n"
    "rejoin_kernel_image_end:\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" const char rejoin_kernel_image[] __attribute__((visibility("hidden")));
extern "C" const char rejoin_kernel_image_end[] __attribute__((visibility("hidden")));

namespace rejoin::device::kernels {

std::string_view image() {
  return {rejoin_kernel_image, static_cast<std::size_t>(rejoin_kernel_image_end - rejoin_kernel_image)};
}

bool built() { return !image().starts_with("no kernels"); }

}  // namespace rejoin::device::kernels
