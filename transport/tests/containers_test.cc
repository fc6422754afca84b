// The containers, against the standard library's under random operations.
#include "transport/containers.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>
#include <string>

namespace rejoin::transport {
namespace {

TEST(Containers, AFifoHoldsWhatADequeHolds) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    Fifo<std::string> fifo;
    std::deque<std::string> model;
    for (int i = 0; i < 2000; ++i) {
      const std::string value = std::to_string(i);
      switch (random() % 8) {
        case 0:
        case 1:
        case 2: fifo.push_back(value), model.push_back(value); break;
        case 3: fifo.push_front(value), model.push_front(value); break;
        case 4:
        case 5:
        case 6:
          if (model.empty()) break;
          ASSERT_EQ(fifo.pop_front(), model.front());
          model.pop_front();
          break;
        default: {
          const auto odd = [&, digit = static_cast<char>('0' + random() % 10)](const std::string& s) {
            return s.back() == digit;
          };
          fifo.erase_if(odd);
          std::erase_if(model, odd);
        }
      }
      ASSERT_EQ(fifo.size(), model.size());
      for (std::size_t k = 0; k < model.size(); ++k) ASSERT_EQ(fifo[k], model[k]) << "seed " << seed;
    }
  }
}

TEST(Containers, ASlotMapFindsWhatWasAddedAndNothingElse) {
  std::mt19937 random(7);
  SlotMap<int> slots;
  std::map<std::uint64_t, int> model;
  std::vector<std::uint64_t> numbers;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      const auto number = slots.add(i);
      ASSERT_NE(number, 0u);
      ASSERT_TRUE(model.emplace(number, i).second) << "given twice";
      numbers.push_back(number);
    } else if (!numbers.empty()) {
      const auto number = numbers[random() % numbers.size()];
      const auto expected = model.find(number);
      const int* found = slots.find(number);
      ASSERT_EQ(found != nullptr, expected != model.end());
      if (found == nullptr) continue;
      ASSERT_EQ(*found, expected->second);
      ASSERT_EQ(slots.remove(number), expected->second);
      ASSERT_EQ(slots.remove(number), std::nullopt);
      model.erase(expected);
    }
  }
  ASSERT_EQ(slots.find(0), nullptr);
  EXPECT_EQ(slots.remove_all().size(), model.size());
  EXPECT_TRUE(slots.remove_all().empty());
}

}  // namespace
}  // namespace rejoin::transport
