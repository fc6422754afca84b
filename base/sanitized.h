// Whether this is a sanitizer build, of which tests take fewer turns: there each costs ten to twenty times as much.
#pragma once

namespace rejoin {

#ifdef REJOIN_SANITIZED
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace rejoin
