#include "rejoin/c.h"

#include <algorithm>
#include <new>

#include "base/command_line.h"
#include "base/fail.h"
#include "rejoin/c_support.h"
#include "rejoin/log.h"
#include "rejoin/session.h"

using rejoin::ErrorCode, rejoin::Result;
using rejoin::c::all_bytes_of, rejoin::c::bytes_of, rejoin::c::code, rejoin::c::failed, rejoin::c::guarded,
    rejoin::c::last_error, rejoin::c::milliseconds_of, rejoin::c::null_argument;

struct rejoin_session {
  std::unique_ptr<rejoin::Session> session;
  void (*waiting)(void*) = nullptr;
  void* with = nullptr;
  std::optional<rejoin::Session::Step> step;
  std::vector<rejoin_range> batch, ahead;
  std::vector<rejoin_batch> batches;  // of `ahead`
  std::vector<rejoin_card> cards;
  std::vector<rejoin_update> updates;
  std::string position;
};

namespace {

static_assert(REJOIN_INVALID_ARGUMENT == static_cast<int>(ErrorCode::invalid_argument) + 1);
static_assert(REJOIN_CANCELLED == static_cast<int>(ErrorCode::cancelled) + 1);
static_assert(REJOIN_CORRUPT == static_cast<int>(ErrorCode::corrupt) + 1);
static_assert(REJOIN_FLOAT32 == static_cast<int>(rejoin::DataType::float32));
static_assert(REJOIN_BFLOAT16 == static_cast<int>(rejoin::DataType::bfloat16));
static_assert(REJOIN_INT64 == static_cast<int>(rejoin::DataType::int64));

rejoin_code put(const Result<std::span<std::byte>>& bytes, rejoin_memory* memory) {
  if (!bytes) return failed(bytes.error());
  *memory = {bytes->data(), bytes->size()};
  return REJOIN_OK;
}

rejoin::CudaStream stream_of(void* cuda_stream) { return static_cast<rejoin::CudaStream>(cuda_stream); }

Result<rejoin::Position> position_of(const char* text, bool compare) {
  if (text == nullptr) return rejoin::Position();
  auto position = rejoin::Position::from_text(text);
  if (position && !compare) return position->without_digest();
  return position;
}

}  // namespace

extern "C" {

const char* rejoin_error(void) { return last_error().data(); }

void rejoin_set_log(void (*sink)(void* with, int level, const char* line), void* with) {
  rejoin::LogSink call;
  if (sink != nullptr)
    call = [=](rejoin::LogLevel level, std::string_view line) {
      sink(with, static_cast<int>(level), std::string(line).c_str());
    };
  (void)guarded([&] { return rejoin::set_log(std::move(call)), REJOIN_OK; });
}
rejoin_code rejoin_set_log_level(int level) {
  if (level < 0 || level > static_cast<int>(rejoin::LogLevel::off))
    return failed({ErrorCode::invalid_argument, fmt::format("log level {} is none of 0 (trace) to 5 (off)", level)});
  rejoin::set_log_level(static_cast<rejoin::LogLevel>(level));
  return REJOIN_OK;
}

rejoin_code rejoin_open(const char* const* settings, size_t count, rejoin_session** session) {
  return guarded([&] {
    if (settings == nullptr && count > 0) return null_argument("the list of settings");
    std::vector<std::string> arguments;
    rejoin::SessionConfig config;
    for (std::size_t i = 0; i < count; ++i) {
      if (settings[i] == nullptr)
        return failed({ErrorCode::invalid_argument, fmt::format("setting {} of {} is null", i, count)});
      const std::string_view setting = settings[i], name = setting.substr(0, setting.find('='));
      const auto wrong = [&](const char* what) {
        return failed(
            {ErrorCode::invalid_argument, fmt::format("setting {} of {}, '{}', {}", i, count, setting, what)});
      };
      if (setting.starts_with('-')) return wrong("is named as a flag: leave out the dashes");
      if (name.empty() || name.size() == setting.size() || name == "help" || name == "version")
        return wrong("is none: give NAME=VALUE");
      if (name.size() + 1 == setting.size()) return wrong("has no value: leave it out for its default");
      arguments.push_back(std::string("--") + settings[i]);
    }
    auto opened = std::make_unique<rejoin_session>();
    rejoin::CommandLine line("");
    config.bind(line);
    if (auto parsed = line.parse(arguments); !parsed) return failed(parsed.error());
    config.while_waiting = [it = opened.get()] {
      if (it->waiting != nullptr) it->waiting(it->with);
    };
    auto made = rejoin::Session::open(config);
    if (!made) return failed(made.error());
    opened->session = std::move(*made);
    *session = opened.release();
    return REJOIN_OK;
  });
}

void rejoin_close(rejoin_session* session) { rejoin::c::destroy(session); }

void rejoin_while_waiting(rejoin_session* session, void (*call)(void*), void* with) {
  session->waiting = call;
  session->with = with;
}

rejoin_code rejoin_add(rejoin_session* session, const rejoin_tensor_spec* spec, const rejoin_memory* memory,
                       uint32_t* tensor) {
  return guarded([&] {
    if (spec == nullptr) return null_argument("what a tensor is");
    if (spec->name == nullptr) return failed({ErrorCode::invalid_argument, "a tensor without a name"});
    rejoin::TensorSpec added{.name = spec->name,
                             .type = static_cast<rejoin::DataType>(spec->type),
                             .count = spec->count,
                             .moments = spec->moments,
                             .elementwise = spec->elementwise != 0};
    std::vector<rejoin_type> types{spec->type};
    if (spec->moment_types != nullptr && spec->moments <= rejoin::kMostMoments)
      types.insert(types.end(), spec->moment_types, spec->moment_types + spec->moments);
    if (spec->gradient_type != nullptr) types.push_back(*spec->gradient_type);
    for (const auto type : types)
      if (type < REJOIN_FLOAT32 || type > REJOIN_INT64)
        return failed({ErrorCode::invalid_argument, fmt::format("tensor '{}' has type {}, which is none of rejoin_type",
                                                                added.name, static_cast<int>(type))});
    if (spec->gradient_type != nullptr) added.gradient_type = static_cast<rejoin::DataType>(*spec->gradient_type);
    if (spec->moment_types != nullptr && spec->moments <= rejoin::kMostMoments)
      for (std::uint32_t i = 0; i < spec->moments; ++i)
        added.moment_types.push_back(static_cast<rejoin::DataType>(spec->moment_types[i]));
    std::vector<std::span<std::byte>> own;
    if (memory != nullptr && added.moments <= rejoin::kMostMoments) own = all_bytes_of(memory, added.moments + 1);
    const auto id = own.empty() ? session->session->add(added) : session->session->add(added, own);
    if (!id) return failed(id.error());
    *tensor = id->index;
    return REJOIN_OK;
  });
}

rejoin_code rejoin_bucket(rejoin_session* session, const uint32_t* tensors, size_t count,
                          const rejoin_memory* gradients, uint32_t* bucket) {
  return guarded([&] {
    if (tensors == nullptr && count > 0) return null_argument("the list of tensors");
    std::vector<rejoin::TensorId> ids;
    for (std::size_t i = 0; i < count; ++i) ids.push_back({tensors[i]});
    const auto id =
        gradients == nullptr ? session->session->bucket(ids) : session->session->bucket(ids, bytes_of(*gradients));
    if (!id) return failed(id.error());
    *bucket = *id;
    return REJOIN_OK;
  });
}
rejoin_code rejoin_keep_exact(rejoin_session* session, uint32_t bucket) {
  return guarded([&] { return code(session->session->keep_exact(bucket)); });
}

rejoin_code rejoin_allocate(rejoin_session* session) {
  return guarded([&] { return code(session->session->allocate()); });
}
rejoin_code rejoin_set_fingerprint(rejoin_session* session, const char* text) {
  return guarded([&] {
    if (text == nullptr) return failed({ErrorCode::invalid_argument, "rejoin_set_fingerprint() without a text"});
    return code(session->session->set_fingerprint(text));
  });
}
void rejoin_use_weights(rejoin_session* session) { session->session->use_weights(); }
rejoin_code rejoin_set_card(rejoin_session* session, const char* text) {
  return rejoin_set_card_listening(session, text, "");
}
rejoin_code rejoin_set_card_listening(rejoin_session* session, const char* text, const char* listening) {
  return guarded([&] {
    if (text == nullptr || listening == nullptr)
      return failed({ErrorCode::invalid_argument, "rejoin_set_card() without a text"});
    return code(session->session->set_card(text, listening));
  });
}
rejoin_code rejoin_weight(rejoin_session* session, uint32_t tensor, rejoin_memory* memory) {
  return guarded([&] { return put(session->session->weight({tensor}), memory); });
}
rejoin_code rejoin_moment(rejoin_session* session, uint32_t tensor, uint32_t index, rejoin_memory* memory) {
  return guarded([&] { return put(session->session->moment({tensor}, index), memory); });
}
rejoin_code rejoin_gradient(rejoin_session* session, uint32_t tensor, rejoin_memory* memory) {
  return guarded([&] { return put(session->session->gradient({tensor}), memory); });
}
rejoin_code rejoin_reduced(rejoin_session* session, uint32_t tensor, rejoin_memory* memory) {
  return guarded([&] {
    const auto bytes = session->session->reduced({tensor});
    if (!bytes) return failed(bytes.error());
    *memory = {const_cast<std::byte*>(bytes->data()), bytes->size()};
    return REJOIN_OK;
  });
}

rejoin_code rejoin_join(rejoin_session* session, const char* position, int compare) {
  return guarded([&] {
    const auto from = position_of(position, compare != 0);
    return from ? code(session->session->join(*from)) : failed(from.error());
  });
}

rejoin_code rejoin_position_step(const char* position, uint64_t* step) {
  return guarded([&] {
    const auto from = position_of(position, true);
    if (!from) return failed(from.error());
    *step = from->step();
    return REJOIN_OK;
  });
}

rejoin_code rejoin_begin_step(rejoin_session* session, rejoin_step* step) {
  return guarded([&] {
    const auto begun = session->session->begin_step();
    if (!begun) return failed(begun.error());
    session->batch.clear();
    session->step = *begun;
    *step = {};
    if (!*begun) return REJOIN_OK;
    for (const auto& range : (*begun)->batch()) session->batch.push_back({range.begin, range.end});
    *step = {(*begun)->number(),       (*begun)->contributes(), (*begun)->leads(),
             (*begun)->contributors(), session->batch.data(),   session->batch.size(),
             (*begun)->weight(),       (*begun)->epoch(),       (*begun)->settled()};
    return REJOIN_OK;
  });
}

rejoin_code rejoin_cards(rejoin_session* session, const rejoin_card** cards, size_t* count) {
  return guarded([&] {
    if (!session->step)
      return failed({ErrorCode::invalid_argument, "rejoin_cards() before rejoin_begin_step() has given a step"});
    session->cards.clear();
    for (const auto& [replica, text] : session->step->cards()) session->cards.push_back({replica, text.c_str()});
    *cards = session->cards.data();
    *count = session->cards.size();
    return REJOIN_OK;
  });
}

rejoin_code rejoin_upcoming(rejoin_session* session, uint32_t steps, const rejoin_batch** batches, size_t* count) {
  return guarded([&] {
    constexpr uint32_t most = 1024;
    if (steps > most)
      return failed({ErrorCode::invalid_argument,
                     fmt::format("rejoin_upcoming() of {} steps: there may be up to {}", steps, most)});
    if (!session->step)
      return failed({ErrorCode::invalid_argument, "rejoin_upcoming() before rejoin_begin_step() has given a step"});
    session->ahead.clear(), session->batches.clear();
    const auto upcoming = session->step->upcoming(steps);
    for (const auto& batch : upcoming)
      for (const auto& range : batch) session->ahead.push_back({range.begin, range.end});
    const rejoin_range* at = session->ahead.data();
    for (const auto& batch : upcoming) {
      session->batches.push_back({at, batch.size()});
      at += batch.size();
    }
    *batches = session->batches.data();
    *count = session->batches.size();
    return REJOIN_OK;
  });
}

rejoin_code rejoin_all_reduce(rejoin_session* session, uint32_t bucket) {
  return guarded([&] { return code(session->session->all_reduce(bucket)); });
}
rejoin_code rejoin_all_reduce_on(rejoin_session* session, uint32_t bucket, void* cuda_stream) {
  return guarded([&] { return code(session->session->all_reduce(bucket, stream_of(cuda_stream))); });
}

rejoin_code rejoin_begin_update(rejoin_session* session, int* committed, const rejoin_update** updates, size_t* count) {
  return guarded([&] {
    const auto begun = session->session->begin_update();
    if (!begun) return failed(begun.error());
    session->updates.clear();
    try {
      session->updates.reserve(*begun ? (*begun)->size() : 0);
    } catch (const std::bad_alloc&) {  // of an update that has begun
      return failed(session->session->abandon_update("memory ran out"));
    }
    if (*begun)
      for (const auto& update : **begun)
        session->updates.push_back({update.tensor.index,
                                    update.first,
                                    update.count,
                                    update.step,
                                    {const_cast<std::byte*>(update.gradient.data()), update.gradient.size()},
                                    update.contributors});
    *committed = begun->has_value();
    *updates = session->updates.data();
    *count = session->updates.size();
    return REJOIN_OK;
  });
}
rejoin_code rejoin_end_update(rejoin_session* session) {
  return guarded([&] { return code(session->session->end_update()); });
}
rejoin_code rejoin_end_update_on(rejoin_session* session, void* cuda_stream) {
  return guarded([&] { return code(session->session->end_update(stream_of(cuda_stream))); });
}
rejoin_code rejoin_scale_feedback(rejoin_session* session, uint64_t step, float factor) {
  return guarded([&] { return code(session->session->scale_feedback(step, factor)); });
}
rejoin_code rejoin_abandon_update(rejoin_session* session, const char* what) {
  return guarded(
      [&] { return failed(session->session->abandon_update(what != nullptr ? what : "it gave no reason")); });
}

rejoin_code rejoin_busy(rejoin_session* session, uint64_t limit_ms, const char* reason) {
  return guarded(
      [&] { return code(session->session->busy(milliseconds_of(limit_ms), reason != nullptr ? reason : "")); });
}
rejoin_code rejoin_busy_in_step(rejoin_session* session, uint64_t limit_ms, const char* reason) {
  return guarded(
      [&] { return code(session->session->busy_in_step(milliseconds_of(limit_ms), reason != nullptr ? reason : "")); });
}
rejoin_code rejoin_done(rejoin_session* session) {
  return guarded([&] { return code(session->session->done()); });
}

rejoin_code rejoin_state_version(const rejoin_session* session, int* known, uint64_t* version) {
  return guarded([&] {
    const auto at = session->session->version();
    *known = at.has_value();
    *version = at.value_or(0);
    return REJOIN_OK;
  });
}
uint64_t rejoin_committed(const rejoin_session* session) { return session->session->committed(); }
int rejoin_intact(rejoin_session* session, uint64_t during_ms) {
  return session->session->intact(milliseconds_of(during_ms)) ? 1 : 0;
}
rejoin_code rejoin_check(const rejoin_session* session) {
  return guarded([&] { return code(session->session->check()); });
}
rejoin_code rejoin_position(rejoin_session* session, const char** position) {
  return guarded([&] {
    const auto at = session->session->position();
    if (!at) return failed(at.error());
    session->position = at->text();
    *position = session->position.c_str();
    return REJOIN_OK;
  });
}
rejoin_code rejoin_state_digest(rejoin_session* session, uint64_t* digest) {
  return guarded([&] {
    const auto of = session->session->state_digest();
    if (!of) return failed(of.error());
    *digest = *of;
    return REJOIN_OK;
  });
}

rejoin_code rejoin_leave(rejoin_session* session) {
  return guarded([&] { return code(session->session->leave()); });
}
void rejoin_interrupt(rejoin_session* session) { session->session->interrupt(); }

}  // extern "C"
