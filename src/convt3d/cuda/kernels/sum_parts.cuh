// Sums of many float32-grade products, added up in parts: each addition errs by what the sum so far is
// worth, so that one long chain of them errs most.
#pragma once
#include "earlier_parts.cuh"

namespace convt3d {

/// Additions that a part has, about; sums of twice as many and less are one part.
constexpr int longest_part = 128;

}  // namespace convt3d
