// Whether this is a sanitizer build, or one whose tests are emulated, of which tests take fewer turns: there each costs ten
// to twenty times as much.
#pragma once

namespace rejoin {

#if defined(REJOIN_SANITIZED) || defined(REJOIN_EMULATED)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace rejoin
