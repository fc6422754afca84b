// Whether this is a build under sanitizers, or for an emulation. Its tests take fewer turns: each costs ten to twenty
// times as much.
#pragma once

namespace rejoin {

#if defined(REJOIN_SANITIZED) || defined(REJOIN_EMULATED)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace rejoin
