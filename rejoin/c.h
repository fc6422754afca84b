/* The session (session.h) for other languages: plain C, nothing but pointers and numbers, in the same library.
 *
 * What each call means, when it is due, and which memory it hands out for how long is described there, at the function
 * of the same name. One thread calls all of a session's but rejoin_interrupt() and rejoin_intact(). Every call
 * that can fail returns REJOIN_OK or another code, and then rejoin_error() has the sentence; what it would have put out
 * is left as it was. No pointer may be null but where it says so, and a session is one that rejoin_open() has given and
 * rejoin_close() has not taken; likewise whatever else is opened.
 */
#ifndef REJOIN_C_H
#define REJOIN_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

#define REJOIN_C_VERSION 2 /* of this file: grows with any change that an older program would not survive */

/* ErrorCode of base/result.h */
typedef enum rejoin_code {
  REJOIN_OK = 0,
  REJOIN_INVALID_ARGUMENT,
  REJOIN_NOT_FOUND,
  REJOIN_MISMATCH,
  REJOIN_REFUSED,
  REJOIN_UNAVAILABLE,
  REJOIN_TIMEOUT,
  REJOIN_CANCELLED,
  REJOIN_EXHAUSTED,
  REJOIN_IO,
  REJOIN_UNREACHABLE,
  REJOIN_CORRUPT
} rejoin_code;

/* DataType of base/types.h */
typedef enum rejoin_type {
  REJOIN_FLOAT32 = 0,
  REJOIN_FLOAT64,
  REJOIN_BFLOAT16,
  REJOIN_FLOAT16,
  REJOIN_INT32,
  REJOIN_INT64
} rejoin_type;

typedef struct rejoin_session rejoin_session;

typedef struct rejoin_memory { /* of the session's device */
  void* data;
  uint64_t bytes;
} rejoin_memory;

typedef struct rejoin_tensor_spec {
  const char* name;
  rejoin_type type;
  uint64_t count;                   /* elements */
  uint32_t moments;                 /* of the same count */
  int elementwise;                  /* the optimizer updates each element from its own gradient and moments alone */
  const rejoin_type* moment_types;  /* of each; null: the weight's */
  const rejoin_type* gradient_type; /* null: the weight's */
} rejoin_tensor_spec;

typedef struct rejoin_range { /* of samples */
  uint64_t begin, end;
} rejoin_range;

typedef struct rejoin_step {
  uint64_t number;           /* 0: the job is finished */
  int contributes, leads;    /* truth values */
  uint32_t contributors;     /* as planned when it began */
  const rejoin_range* batch; /* the session's, until the next rejoin_begin_step() */
  size_t batch_count;
  uint64_t weight; /* what all gradients of this step are to be multiplied with */
  uint64_t epoch;
  int settled; /* a truth value */
} rejoin_step;

typedef struct rejoin_card {
  uint32_t replica;
  const char* text;
} rejoin_card;

typedef struct rejoin_batch {
  const rejoin_range* ranges;
  size_t count;
} rejoin_batch;

typedef struct rejoin_update {
  uint32_t tensor;
  uint64_t first, count; /* elements */
  uint64_t step;
  rejoin_memory gradient; /* to be read only */
  uint32_t contributors;  /* whose gradients are in this mean */
} rejoin_update;

/* Returns the message of this thread's last call that failed, never null, and of 2,047 bytes at most. The text stays
 * until another call fails on this thread. */
const char* rejoin_error(void);
/* Say where the library's log lines go, and which: log.h. `level` is 0 (trace), 1 (debug), 2 (info), 3 (warn), 4
 * (error); the second function also takes 5 (none). Any of the library's threads may call `sink`, one at a time, and
 * waits for it; null: lines go to standard error. */
void rejoin_set_log(void (*sink)(void* with, int level, const char* line), void* with);
rejoin_code rejoin_set_log_level(int level);
/* Returns the library's version, as "1.2.3". */
const char* rejoin_version(void);

/* `settings` has `count` texts of the form "name=value", named as the flags of a trainer without their dashes
 * ("replica=1", "socket=/run/rejoin.sock"). Others come from REJOIN_* variables, and else from the defaults. A value
 * that is empty is an error. */
rejoin_code rejoin_open(const char* const* settings, size_t count, rejoin_session** session);
/* Destroys the session, and waits for the library's threads. Null is allowed. */
void rejoin_close(rejoin_session* session);
/* Sets the function that waiting calls call from time to time (SessionConfig::while_waiting); null removes it. It must
 * not be called within that function. */
void rejoin_while_waiting(rejoin_session* session, void (*call)(void*), void* with);

/* `memory` has the weight and then each moment, or is null where the session is to allocate them. */
rejoin_code rejoin_add(rejoin_session* session, const rejoin_tensor_spec* spec, const rejoin_memory* memory,
                       uint32_t* tensor);
/* `gradients` may be null: the session allocates them. */
rejoin_code rejoin_bucket(rejoin_session* session, const uint32_t* tensors, size_t count,
                          const rejoin_memory* gradients, uint32_t* bucket);
/* See Session::keep_exact(). It is called before rejoin_allocate(). */
rejoin_code rejoin_keep_exact(rejoin_session* session, uint32_t bucket);
rejoin_code rejoin_allocate(rejoin_session* session);
/* See Session::set_fingerprint(). It is called before rejoin_join(). */
rejoin_code rejoin_set_fingerprint(rejoin_session* session, const char* text);
void rejoin_use_weights(rejoin_session* session);
rejoin_code rejoin_set_card(rejoin_session* session, const char* text); /* before rejoin_join() */
/* … with where the card's address is listened on: see Session::set_card(). */
rejoin_code rejoin_set_card_listening(rejoin_session* session, const char* text, const char* listening);
rejoin_code rejoin_weight(rejoin_session* session, uint32_t tensor, rejoin_memory* memory);
rejoin_code rejoin_moment(rejoin_session* session, uint32_t tensor, uint32_t index, rejoin_memory* memory);
rejoin_code rejoin_gradient(rejoin_session* session, uint32_t tensor, rejoin_memory* memory);
rejoin_code rejoin_reduced(rejoin_session* session, uint32_t tensor, rejoin_memory* memory);

/* What fills the state may still be queued on the GPU: all streams of this process are waited for.
 * `position` is what rejoin_position() gave when the state was saved, or null for a fresh job. With `compare` 0 the
 * state may differ from the one that was saved (Position::without_digest()). */
rejoin_code rejoin_join(rejoin_session* session, const char* position, int compare);
/* Gives the step that a position is of. */
rejoin_code rejoin_position_step(const char* position, uint64_t* step);

rejoin_code rejoin_begin_step(rejoin_session* session, rejoin_step* step);
/* Gives Step::upcoming() of the step under way: up to `steps` batches, of 1,024 at most, which are the session's until
 * the next call of this or of rejoin_begin_step(). */
rejoin_code rejoin_upcoming(rejoin_session* session, uint32_t steps, const rejoin_batch** batches, size_t* count);
/* Gives Step::cards(), by contributor; they are the session's until the next rejoin_begin_step(). */
rejoin_code rejoin_cards(rejoin_session* session, const rejoin_card** cards, size_t* count);
rejoin_code rejoin_all_reduce(rejoin_session* session, uint32_t bucket);
rejoin_code rejoin_all_reduce_on(rejoin_session* session, uint32_t bucket, void* cuda_stream);
/* `committed` is 0 where the same step comes once more. The updates are the session's until the update ends. */
rejoin_code rejoin_begin_update(rejoin_session* session, int* committed, const rejoin_update** updates, size_t* count);
rejoin_code rejoin_end_update(rejoin_session* session);
rejoin_code rejoin_end_update_on(rejoin_session* session, void* cuda_stream);
/* See Session::scale_feedback(): by which factor, 0 or above, the update of `step` has multiplied the mean gradient; 0
 * where it was skipped. It is called after the update, before the next step's first rejoin_all_reduce(). */
rejoin_code rejoin_scale_feedback(rejoin_session* session, uint64_t step, float factor);
/* It always fails, with the error that all later calls have: REJOIN_CANCELLED. */
rejoin_code rejoin_abandon_update(rejoin_session* session, const char* what);

/* The trainer is busy for up to so many milliseconds with what the reason says, until rejoin_done(). */
rejoin_code rejoin_busy(rejoin_session* session, uint64_t limit_ms, const char* reason);
/* The same for what each step does and may take long with now and then, such as reading its data: it counts as
 * computing. */
rejoin_code rejoin_busy_in_step(rejoin_session* session, uint64_t limit_ms, const char* reason);
rejoin_code rejoin_done(rejoin_session* session);

/* `known` is 0 where the state is of no one version. */
rejoin_code rejoin_state_version(const rejoin_session* session, int* known, uint64_t* version);
uint64_t rejoin_committed(const rejoin_session* session);
int rejoin_intact(rejoin_session* session, uint64_t during_ms); /* a truth value; any thread, once joined */
rejoin_code rejoin_check(const rejoin_session* session);
/* Gives one line of ASCII, which is the session's until the next call of this. */
rejoin_code rejoin_position(rejoin_session* session, const char** position);
rejoin_code rejoin_state_digest(rejoin_session* session, uint64_t* digest);

rejoin_code rejoin_leave(rejoin_session* session);
/* Any thread and a signal's handler may call it until rejoin_close(). */
void rejoin_interrupt(rejoin_session* session);

/* Gives a state as of one step to other processes, without a session: checkpoint_transfer.h. One thread at a time may
 * call these, whichever. */
typedef struct rejoin_checkpoint_server rejoin_checkpoint_server;
/* `transport`, `listen` and `advertise` may be null for the defaults. */
rejoin_code rejoin_checkpoint_serve(const char* transport, const char* listen, const char* advertise,
                                    rejoin_checkpoint_server** server);
void rejoin_checkpoint_server_close(rejoin_checkpoint_server* server); /* null is allowed */
/* The text is the server's, and stays as long as it. */
const char* rejoin_checkpoint_address(const rejoin_checkpoint_server* server);
/* Copies the description. The buffers stay the caller's, who leaves them as they are until
 * rejoin_checkpoint_withdraw(). */
rejoin_code rejoin_checkpoint_publish(rejoin_checkpoint_server* server, uint64_t step, const void* description,
                                      uint64_t description_bytes, const rejoin_memory* buffers, size_t count);
/* Gives in `cut_off` how many fetches it has ended. For `cancelled` see below. */
rejoin_code rejoin_checkpoint_withdraw(rejoin_checkpoint_server* server, uint64_t patience_ms, int (*cancelled)(void*),
                                       void* with, uint64_t* cut_off);

/* The end that fetches. All calls come from one thread. */
typedef struct rejoin_checkpoint_fetch rejoin_checkpoint_fetch;
/* While anything waits the library calls `cancelled` with `with`; any value but 0 ends the wait. It may be null. */
rejoin_code rejoin_checkpoint_fetch_open(const char* transport, const char* address, uint64_t step, uint64_t limit_ms,
                                         int (*cancelled)(void*), void* with, rejoin_checkpoint_fetch** fetch);
void rejoin_checkpoint_fetch_close(rejoin_checkpoint_fetch* fetch); /* null is allowed */
/* What these return is the fetch's until it is closed. */
rejoin_memory rejoin_checkpoint_description(const rejoin_checkpoint_fetch* fetch);
const uint64_t* rejoin_checkpoint_sizes(const rejoin_checkpoint_fetch* fetch, size_t* count);
rejoin_code rejoin_checkpoint_fetch_into(rejoin_checkpoint_fetch* fetch, const rejoin_memory* buffers, size_t count,
                                         uint64_t limit_ms);

/* Collective operations of processes whose membership comes from elsewhere: process_group.h. Any thread may
 * call these. */

/* Collective of base/types.h */
typedef enum rejoin_collective {
  REJOIN_ALL_REDUCE = 0,
  REJOIN_REDUCE,
  REJOIN_BROADCAST,
  REJOIN_ALL_GATHER,
  REJOIN_REDUCE_SCATTER,
  REJOIN_GATHER,
  REJOIN_SCATTER,
  REJOIN_ALL_TO_ALL,
  REJOIN_BARRIER,
  REJOIN_SEND,
  REJOIN_RECEIVE
} rejoin_collective;

/* Combine of base/types.h */
typedef enum rejoin_combine {
  REJOIN_SUM = 0,
  REJOIN_MEAN,
  REJOIN_MAXIMUM,
  REJOIN_MINIMUM,
  REJOIN_PRODUCT,
  REJOIN_BITWISE_AND, /* for integers alone, as the next two */
  REJOIN_BITWISE_OR,
  REJOIN_BITWISE_XOR
} rejoin_combine;

typedef struct rejoin_collective_call { /* CollectiveCall; zeros are its defaults */
  uint32_t kind;                        /* rejoin_collective */
  uint32_t type;                        /* rejoin_type */
  uint32_t combine;                     /* rejoin_combine */
  uint32_t root, tag;
  const rejoin_memory* inputs; /* all in the host's memory, or all in that of the group's device */
  size_t input_count;
  const rejoin_memory* outputs;
  size_t output_count;
  uint64_t limit_ms;
  uint32_t on_device; /* 1: buffers are in the memory of the group's device */
  void* stream;       /* with on_device the operation begins behind this cudaStream_t */
} rejoin_collective_call;

typedef struct rejoin_group rejoin_group;
typedef struct rejoin_work rejoin_work;
/* `transport`, `listen` and `advertise` may be null for the defaults. */
rejoin_code rejoin_group_open(const char* transport, const char* listen, const char* advertise, rejoin_group** group);
/* Opens a group with a device such as "cuda:0", or null for none. */
rejoin_code rejoin_group_open_on(const char* transport, const char* listen, const char* advertise, const char* device,
                                 rejoin_group** group);
/* … and, or null, with ListenConfig::towards. */
rejoin_code rejoin_group_open_towards(const char* transport, const char* listen, const char* advertise,
                                      const char* device, const char* towards, rejoin_group** group);
/* The caller calls it when no other call on the group is under way. Works may be closed later. Null is allowed. */
void rejoin_group_close(rejoin_group* group);
/* The text is the group's, and stays as long as it. */
const char* rejoin_group_handle(const rejoin_group* group);
rejoin_code rejoin_group_reconfigure(rejoin_group* group, uint64_t number, const char* const* members, size_t count,
                                     uint64_t limit_ms, int (*cancelled)(void*), void* with);
uint32_t rejoin_group_rank(const rejoin_group* group);
uint32_t rejoin_group_size(const rejoin_group* group);
/* Not 0: a member has given up what there was since the last reconfigure, as far as this one has heard. */
int rejoin_group_failed(const rejoin_group* group);
rejoin_code rejoin_group_start(rejoin_group* group, const rejoin_collective_call* call, rejoin_work** work);
rejoin_code rejoin_group_next_done(rejoin_group* group, uint64_t limit_ms, uint64_t* number);
rejoin_code rejoin_group_abort(rejoin_group* group, const char* reason);
rejoin_code rejoin_group_shutdown(rejoin_group* group, uint64_t limit_ms);
int rejoin_work_done(const rejoin_work* work);
rejoin_code rejoin_work_wait(rejoin_work* work, uint64_t limit_ms, int (*cancelled)(void*), void* with);
/* For a device's memory: this cudaStream_t waits, and not the caller. */
rejoin_code rejoin_work_wait_on(rejoin_work* work, void* stream);
rejoin_code rejoin_work_notify(rejoin_work* work, uint64_t number);
void rejoin_work_close(rejoin_work* work); /* the operation goes on; null is allowed */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
