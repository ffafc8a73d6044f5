// One of two types, by a condition.
#pragma once

namespace convt3d {

template <bool Condition, typename Yes, typename No>
struct Select {
  using Type = Yes;
};
template <typename Yes, typename No>
struct Select<false, Yes, No> {
  using Type = No;
};

}  // namespace convt3d
