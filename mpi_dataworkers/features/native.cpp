// The eleven operators on whole features: what `operators.py` says, compiled on the host that runs it by `native.py`.
//
// A call does one group of chains: features of one type with the same operators, each with numbers of its own. A feature
// goes through in tiles that stay in the first-level cache, and each operator is one loop over a tile that the compiler
// makes vectors of. Nothing is packed: features are read and written where they are.
//
// Floating point is computed without libm, without contraction and without a reordering of sums, so that the bits are
// those of any other host on which this was compiled.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

enum Operator : int64_t { LOGIT, BOX_COX, ONEHOT, SIGRID_HASH, FIRST_X, CLAMP, BUCKETIZE, NGRAM, MAP_ID, FILL_NULL, CAST };
enum Type : int64_t { FLOAT32, FLOAT64, INT32, INT64 };

// One operator of a group; native.py has the same fields.
struct Step {
    int64_t what, from, to;
};

// What differs from feature to feature: numbers, or the address of a table.
union Number {
    double real;
    int64_t whole;
};
constexpr int NUMBERS = 4;

struct Group {
    int64_t num_steps, num_features, num_rows, width;
    const Step *steps;
    const Number *numbers;  // [step][feature][NUMBERS]
    const int64_t *sizes;   // of each feature, in values
    const void *const *values;
    const uint8_t *const *valid;      // null where all are there; of a dense feature
    const int64_t *const *lengths;    // null for dense features
    void *const *made;                // where the results are to be
    int64_t *const *made_lengths;     // null where a chain does not change lengths
};

// A loop that calls a function does not become one of vectors.
#define INLINE inline __attribute__((always_inline))

constexpr int64_t TILE = 2048;

struct alignas(64) Tile {
    unsigned char bytes[TILE * 8];
};

int64_t size_of(int64_t type) { return type == FLOAT32 || type == INT32 ? 4 : 8; }

template <class To, class From>
INLINE To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    union {
        From from;
        To to;
    } both = {from};
    return both.to;
}

// --- reals ------------------------------------------------------------------------------------------------------

// log of a positive, finite, normal number: of m * 2**e with m near 1, a series in (m - 1) / (m + 1).
INLINE float log_of(float x) {
    int32_t word = bits<int32_t>(x) - 0x3f3504f3;
    float exponent = (float)(word >> 23);
    float m = bits<float>((word & 0x007fffff) + 0x3f3504f3);
    float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float series = z * (0.33333333f + z * (0.2f + z * (0.14285714f + z * 0.11111111f)));
    return exponent * 0.693359375f + (exponent * -2.12194440e-4f + 2.0f * (s + s * series));
}

// log2 of such a number in float64, within 1e-9 of it: the same series with the coefficients that fit best.
INLINE double log2_of(double x) {
    // With 1024 added to it the exponent is above 0: the lowest bits of a number between 2**52 and 2**53.
    uint64_t word = bits<uint64_t>(x) - 0x3fe6a09e667f3bcdULL + (1024ULL << 52);
    double exponent = bits<double>((word >> 52) | 0x4330000000000000ULL) - (4503599627370496.0 + 1024.0);
    double m = bits<double>((word & 0x000fffffffffffffULL) + 0x3fe6a09e667f3bcdULL);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    return exponent + s * (2.8853900797912 + z * (0.9617988462494295 + z * (0.5767145101942748 + z * 0.43173301904909234)));
}

// 2**x - 1 for x of at most 1022, within 2e-8 of it; below -1010 as if x were -1010.
INLINE double exp2m1_of(double x) {
    x = x < -1010.0 ? -1010.0 : x;
    // Added and subtracted again, this rounds to a whole number, which then stands in the lowest bits.
    double shifted = x + 6755399441055744.0;
    double r = x - (shifted - 6755399441055744.0);
    double q = r * (0.6931471880293425 + r * (0.2402265092234275 + r * (0.05550357104253126 + r * (0.009618056669885529
               + r * (0.001339086735133181 + r * 0.00015461447463365068)))));
    double power = bits<double>((bits<uint64_t>(shifted) << 52) + 0x3ff0000000000000ULL);
    return power * q + (power - 1.0);
}

template <class T>
void logit(const T *__restrict from, float *__restrict to, int64_t count, const Number *numbers) {
    const float low = (float)numbers[0].real, high = (float)numbers[1].real;
    constexpr int64_t BLOCK = 128, AHEAD = 1024, LINE = 64;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        // It computes for so long on what it has that the processor does not look ahead by itself.
        for (int64_t at = 0; at < BLOCK; at += LINE / sizeof(T)) __builtin_prefetch(from + begin + AHEAD + at);
        for (int64_t at = 0; at < BLOCK; at += LINE / sizeof(float)) __builtin_prefetch(to + begin + AHEAD + at, 1);
        const int64_t end = begin + BLOCK < count ? begin + BLOCK : count;
        for (int64_t i = begin; i < end; i++) {
            float x = (float)from[i];
            float t = x < low ? low : x;
            t = t > high ? high : t;
            float found = log_of(t / (1.0f - t));
            to[i] = x == x ? found : x;
        }
    }
}

// log2 of any number above 0, denormal ones of float64 and infinity among them.
template <class T>
INLINE double log2_of_any(T given) {
    const double x = (double)given;
    const bool is_denormal = sizeof(T) == 8 && x < 2.2250738585072014e-308;
    double found = log2_of(is_denormal ? x * 18014398509481984.0 : x) - (is_denormal ? 54.0 : 0.0);
    return x == __builtin_inf() ? x : found;
}

template <class T>
void box_cox(const T *__restrict from, float *__restrict to, int64_t count, const Number *numbers) {
    const double lmbda = numbers[0].real, inverse = 1.0 / lmbda, infinite = __builtin_inf(), ln2 = 0.69314718055994530942;
    // Nearer to 0 the two are the same, and 1 / lmbda may be infinite.
    if (lmbda < 1e-300 && lmbda > -1e-300) {
        for (int64_t i = 0; i < count; i++)
            to[i] = (float)(from[i] > (T)0 ? log2_of_any(from[i]) * ln2 : (double)from[i]);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        double y = log2_of_any(from[i]) * lmbda;
        double found = (y > 1022.0 ? infinite : exp2m1_of(y)) * inverse;
        to[i] = (float)(from[i] > (T)0 ? found : (double)from[i]);
    }
}

// Borders are padded with infinity to a power of two less one. Each pass halves what is left for all values of a tile.
template <class T>
void bucketize(const T *__restrict from, int32_t *__restrict to, int64_t count, const Number *numbers) {
    const T *borders = bits<const T *>(numbers[0].whole);
    const int32_t of_nan = (int32_t)numbers[2].whole;
    for (int64_t i = 0; i < count; i++) to[i] = 0;
    for (int32_t half = 1 << (numbers[1].whole - 1); half; half >>= 1)
        for (int64_t i = 0; i < count; i++) to[i] += borders[to[i] + half - 1] < from[i] ? half : 0;
    for (int64_t i = 0; i < count; i++) to[i] = from[i] == from[i] ? to[i] : of_nan;
}

// --- ids --------------------------------------------------------------------------------------------------------

void sigrid_hash(const int64_t *__restrict from, int64_t *__restrict to, int64_t count, const Number *numbers) {
    const uint64_t factor = 0x9ddfea08eb382d69ULL, salt = (uint64_t)numbers[0].whole;
    const int64_t max = numbers[1].whole;
    for (int64_t i = 0; i < count; i++) {
        // ~x + (x << 21) and the other sums of shifted words are products.
        uint64_t x = (uint64_t)from[i] * 2097151ULL - 1;
        x = (x ^ (x >> 24)) * 265ULL;
        x = (x ^ (x >> 14)) * 21ULL;
        x = (x ^ (x >> 28)) * 2147483649ULL;
        x = (x ^ salt) * factor;
        x = (x ^ (x >> 47) ^ salt) * factor;
        to[i] = (int64_t)((x ^ (x >> 47)) * factor);
    }
    if (max > (1LL << 61)) {
        for (int64_t i = 0; i < count; i++) {
            int64_t rest = to[i] % max;
            to[i] = rest < 0 ? rest + max : rest;
        }
        return;
    }
    // A quotient in float64 is off by what its 53 bits leave out; the second one is that of the rest, and off by one.
    const double inverse = 1.0 / (double)max;
    for (int64_t i = 0; i < count; i++) {
        uint64_t rest = (uint64_t)to[i];
        rest -= (uint64_t)(int64_t)((double)to[i] * inverse) * (uint64_t)max;
        rest -= (uint64_t)(int64_t)((double)(int64_t)rest * inverse) * (uint64_t)max;
        int64_t found = (int64_t)rest;
        found += found < 0 ? max : 0;
        found += found < 0 ? max : 0;
        found -= found >= max ? max : 0;
        to[i] = found;
    }
}

template <class T>
void map_id(const T *__restrict from, int64_t *__restrict to, int64_t count, const Number *numbers) {
    const int64_t *table = bits<const int64_t *>(numbers[0].whole);
    const int64_t size = numbers[1].whole;
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)(int64_t)from[i];
        to[i] = table[at < (uint64_t)size ? at : (uint64_t)size];  // behind the table stands 0
    }
}

// --- all --------------------------------------------------------------------------------------------------------

template <class T>
T number_of(const Number &number) { return (T)number.whole; }
template <>
float number_of<float>(const Number &number) { return (float)number.real; }
template <>
double number_of<double>(const Number &number) { return number.real; }

template <class T>
void clamp(const T *__restrict from, T *__restrict to, int64_t count, const Number *numbers) {
    const T low = number_of<T>(numbers[0]), high = number_of<T>(numbers[1]);
    for (int64_t i = 0; i < count; i++) {
        T x = from[i];
        x = x < low ? low : x;
        to[i] = x > high ? high : x;
    }
}

template <class T>
void fill_null(const T *__restrict from, T *__restrict to, int64_t count, const Number *numbers, const uint8_t *valid) {
    const T value = number_of<T>(numbers[0]);
    const bool of_nan = numbers[1].whole != 0;
    if (valid) {
        for (int64_t i = 0; i < count; i++) to[i] = valid[i] ? from[i] : value;
        if (of_nan)
            for (int64_t i = 0; i < count; i++) to[i] = to[i] == to[i] ? to[i] : value;
    } else if (of_nan) {
        for (int64_t i = 0; i < count; i++) to[i] = from[i] == from[i] ? from[i] : value;
    } else {
        memcpy(to, from, count * sizeof(T));
    }
}

template <class T> struct Limits;
template <> struct Limits<int32_t> { static constexpr int32_t least = INT32_MIN, most = INT32_MAX; };
template <> struct Limits<int64_t> { static constexpr int64_t least = INT64_MIN, most = INT64_MAX; };

template <class From, class To>
struct Cast {  // to floating point, and from int32 to int64
    static To of(From x) { return (To)x; }
};
template <class From, class To>
struct CastFromReal {
    static To of(From x) {
        const From low = (From)Limits<To>::least, end = -low;  // both are powers of two
        From inside = x >= end ? (From)0 : x;
        inside = inside < low ? low : inside;
        inside = inside == inside ? inside : (From)0;
        To found = (To)inside;
        return x >= end ? Limits<To>::most : found;
    }
};
template <> struct Cast<float, int32_t> : CastFromReal<float, int32_t> {};
template <> struct Cast<float, int64_t> : CastFromReal<float, int64_t> {};
template <> struct Cast<double, int32_t> : CastFromReal<double, int32_t> {};
template <> struct Cast<double, int64_t> : CastFromReal<double, int64_t> {};
template <> struct Cast<int64_t, int32_t> {
    static int32_t of(int64_t x) {
        x = x < INT32_MIN ? INT32_MIN : x;
        return (int32_t)(x > INT32_MAX ? INT32_MAX : x);
    }
};

template <class From, class To>
void cast_values(const From *__restrict from, To *__restrict to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = Cast<From, To>::of(from[i]);
}

template <class From>
void cast_to(int64_t type, const From *from, void *to, int64_t count) {
    if (type == FLOAT32) cast_values(from, (float *)to, count);
    else if (type == FLOAT64) cast_values(from, (double *)to, count);
    else if (type == INT32) cast_values(from, (int32_t *)to, count);
    else cast_values(from, (int64_t *)to, count);
}

template <class T>
void by_value(const Step &step, const T *from, void *to, int64_t count, const Number *numbers, const uint8_t *valid) {
    if (step.what == CLAMP) clamp(from, (T *)to, count, numbers);
    else if (step.what == FILL_NULL) fill_null(from, (T *)to, count, numbers, valid);
    else cast_to(step.to, from, to, count);
}

// An operator that makes one value of each, on no more than a tile.
void on_tile(const Step &step, const void *from, void *to, int64_t count, const Number *numbers, const uint8_t *valid) {
    const bool is_64 = size_of(step.from) == 8;
    switch (step.what) {
    case LOGIT:
        is_64 ? logit((const double *)from, (float *)to, count, numbers) : logit((const float *)from, (float *)to, count, numbers);
        break;
    case BOX_COX:
        is_64 ? box_cox((const double *)from, (float *)to, count, numbers) : box_cox((const float *)from, (float *)to, count, numbers);
        break;
    case BUCKETIZE:
        is_64 ? bucketize((const double *)from, (int32_t *)to, count, numbers)
              : bucketize((const float *)from, (int32_t *)to, count, numbers);
        break;
    case SIGRID_HASH:
        sigrid_hash((const int64_t *)from, (int64_t *)to, count, numbers);
        break;
    case MAP_ID:
        is_64 ? map_id((const int64_t *)from, (int64_t *)to, count, numbers) : map_id((const int32_t *)from, (int64_t *)to, count, numbers);
        break;
    default:
        if (step.from == FLOAT32) by_value(step, (const float *)from, to, count, numbers, valid);
        else if (step.from == FLOAT64) by_value(step, (const double *)from, to, count, numbers, valid);
        else if (step.from == INT32) by_value(step, (const int32_t *)from, to, count, numbers, valid);
        else by_value(step, (const int64_t *)from, to, count, numbers, valid);
    }
}

// --- rows -------------------------------------------------------------------------------------------------------

bool is_by_row(int64_t what) { return what == ONEHOT || what == FIRST_X || what == NGRAM; }

// The lengths of the lists that FirstX and Ngram make; their sum.
int64_t new_lengths(const Step &step, const int64_t *from, int64_t *to, int64_t rows, const Number *numbers) {
    const int64_t n = numbers[0].whole;
    int64_t total = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t length = from[row], size = length < n ? length : n;
        to[row] = step.what == FIRST_X ? size : (length - size + (length > 0)) * size;
        total += to[row];
    }
    return total;
}

// Values that are copied at once, whether a list has so many or not: what is too much is written over by the next list.
constexpr int64_t AT_ONCE = 8;

template <class T>
void first_x(const T *from, T *to, const int64_t *lengths, int64_t rows, int64_t n, int64_t count, int64_t new_count) {
    const T *const from_end = from + count, *const to_end = to + new_count;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t length = lengths[row], kept = length < n ? length : n;
        const int64_t room = from_end - from < to_end - to ? from_end - from : to_end - to;
        int64_t i = 0;
        if (room >= AT_ONCE) {
            // Also of an empty list: a processor cannot foresee which ones are.
            do {
                memcpy(to + i, from + i, AT_ONCE * sizeof(T));
                i += AT_ONCE;
            } while (i < kept && room >= i + AT_ONCE);
        }
        for (; i < kept; i++) to[i] = from[i];
        from += length;
        to += kept;
    }
}

// Windows of two: a list of one value has none, and stays as it is.
template <class T>
void pairs(const T *from, T *to, const int64_t *lengths, int64_t rows, int64_t count, int64_t new_count) {
    const T *const from_end = from + count, *const to_end = to + new_count;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t length = lengths[row], windows = length - 1;
        if (length == 1) *to = *from;
        int64_t start = 0;
        for (; start < windows && from_end - from > start + AT_ONCE && to_end - to >= 2 * (start + AT_ONCE); start += AT_ONCE) {
            T made[2 * AT_ONCE];
            for (int64_t i = 0; i < AT_ONCE; i++) {
                made[2 * i] = from[start + i];
                made[2 * i + 1] = from[start + i + 1];
            }
            memcpy(to + 2 * start, made, sizeof made);
        }
        for (; start < windows; start++) {
            to[2 * start] = from[start];
            to[2 * start + 1] = from[start + 1];
        }
        from += length;
        to += length > 1 ? 2 * windows : length;
    }
}

template <class T>
void ngram(const T *from, T *to, const int64_t *lengths, int64_t rows, int64_t n, int64_t count, int64_t new_count) {
    if (n == 2) return pairs(from, to, lengths, rows, count, new_count);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t length = lengths[row], size = length < n ? length : n;
        for (int64_t start = 0; size && start + size <= length; start++)
            for (int64_t i = 0; i < size; i++) *to++ = from[start + i];
        from += length;
    }
}

template <class T>
void onehot(const T *from, float *to, const int64_t *lengths, int64_t width, int64_t rows, const Number *numbers) {
    constexpr int64_t BLOCK = 128;
    const float low = (float)numbers[0].real, step = (float)numbers[1].real;
    const int64_t classes = numbers[2].whole;
    const float end = (float)classes, none = __builtin_nanf("");
    float first[BLOCK];
    int64_t chosen[BLOCK];
    for (int64_t begin = 0; begin < rows; begin += BLOCK) {
        const int64_t some = rows - begin < BLOCK ? rows - begin : BLOCK;
        for (int64_t i = 0; i < some; i++) {
            const int64_t length = lengths ? lengths[begin + i] : width;
            first[i] = length ? (float)*from : none;
            from += length;
        }
        for (int64_t i = 0; i < some; i++) {
            float place = (first[i] - low) / step;
            place = place >= 0.0f ? place : 0.0f;
            chosen[i] = (int64_t)(place < end ? place : 0.0f);
        }
        memset(to, 0, some * classes * sizeof(float));
        for (int64_t i = 0; i < some; i++) to[i * classes + chosen[i]] = 1.0f;
        to += some * classes;
    }
}

template <class T>
void on_lists(const Step &step, const void *from, void *to, const int64_t *lengths, int64_t rows, int64_t n, int64_t count,
              int64_t new_count) {
    (step.what == NGRAM ? ngram<T> : first_x<T>)((const T *)from, (T *)to, lengths, rows, n, count, new_count);
}

void onehot_of(const Step &step, const void *from, float *to, const int64_t *lengths, int64_t width, int64_t rows,
               const Number *numbers) {
    if (step.from == FLOAT32) onehot((const float *)from, to, lengths, width, rows, numbers);
    else if (step.from == FLOAT64) onehot((const double *)from, to, lengths, width, rows, numbers);
    else if (step.from == INT32) onehot((const int32_t *)from, to, lengths, width, rows, numbers);
    else onehot((const int64_t *)from, to, lengths, width, rows, numbers);
}

// --- features ---------------------------------------------------------------------------------------------------

// Memory that grows to what the largest feature of a call needs.
struct Scratch {
    void *memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    bool holds(size_t bytes) {
        if (bytes <= size) return true;
        free(memory);
        memory = malloc(bytes);
        size = memory ? bytes : 0;
        return memory != nullptr;
    }
};

void on_values(const Group &group, int64_t feature, int64_t first, int64_t last, const void *from, void *to,
               int64_t count, const uint8_t *valid, Tile *tiles) {
    const int64_t from_size = size_of(group.steps[first].from), to_size = size_of(group.steps[last - 1].to);
    for (int64_t begin = 0; begin < count; begin += TILE) {
        const int64_t some = count - begin < TILE ? count - begin : TILE;
        const void *here = (const char *)from + begin * from_size;
        for (int64_t at = first; at < last; at++) {
            void *there = at == last - 1 ? (void *)((char *)to + begin * to_size) : tiles[at % 2].bytes;
            const Number *numbers = group.numbers + (at * group.num_features + feature) * NUMBERS;
            on_tile(group.steps[at], here, there, some, numbers, at == first && valid ? valid + begin : nullptr);
            here = there;
        }
    }
}

// One feature through its chain; false where there is no memory.
bool on_feature(const Group &group, int64_t feature, Tile *tiles, Scratch *values, Scratch *lengths) {
    const void *here = group.values[feature];
    const int64_t *now = group.lengths ? group.lengths[feature] : nullptr;
    const uint8_t *valid = group.valid ? group.valid[feature] : nullptr;
    const int64_t rows = group.num_rows;
    int64_t count = group.sizes[feature], width = group.width, turn = 0;
    for (int64_t at = 0, next; at < group.num_steps; at = next, turn ^= 1) {
        const Step &step = group.steps[at];
        const Number *numbers = group.numbers + (at * group.num_features + feature) * NUMBERS;
        const int64_t *new_now = now;
        int64_t new_count = count;
        next = at + 1;
        if (step.what == ONEHOT) {
            new_count = rows * numbers[2].whole;
            new_now = nullptr;
        } else if (is_by_row(step.what)) {
            Scratch &other = lengths[now == lengths[0].memory];  // not where they are now
            if (!other.holds(rows * 8 + 1)) return false;
            int64_t *made = (int64_t *)other.memory;
            new_count = new_lengths(step, now, made, rows, numbers);
            new_now = made;
        } else {
            while (next < group.num_steps && !is_by_row(group.steps[next].what)) next++;
        }
        void *there = group.made[feature];
        if (next < group.num_steps) {
            if (!values[turn].holds(new_count * 8 + 1)) return false;
            there = values[turn].memory;
        }
        if (step.what == ONEHOT) onehot_of(step, here, (float *)there, now, width, rows, numbers);
        else if (!is_by_row(step.what)) on_values(group, feature, at, next, here, there, count, valid, tiles);
        else if (size_of(step.from) == 4) on_lists<int32_t>(step, here, there, now, rows, numbers[0].whole, count, new_count);
        else on_lists<int64_t>(step, here, there, now, rows, numbers[0].whole, count, new_count);
        if (step.what == ONEHOT) width = numbers[2].whole;
        here = there;
        now = new_now;
        count = new_count;
        valid = nullptr;
    }
    return true;
}

}  // namespace

// Whether the lists of each feature are as many values as it has, and none has a negative length.
extern "C" int hetstream_are_lists(int64_t num_features, int64_t num_rows, const int64_t *const *lengths, const int64_t *sizes) {
    for (int64_t feature = 0; feature < num_features; feature++) {
        const uint64_t size = (uint64_t)sizes[feature];
        uint64_t total = 0, is_wrong = 0;
        for (int64_t row = 0; row < num_rows; row++) {
            const uint64_t length = (uint64_t)lengths[feature][row];  // a negative one is larger than all sizes
            is_wrong |= length > size;
            total += length;
        }
        if (is_wrong || total != size) return 0;
    }
    return 1;
}

// How many values each feature will have, and the lengths of its lists.
extern "C" void hetstream_sizes(const Group *group, int64_t *sizes) {
    for (int64_t feature = 0; feature < group->num_features; feature++) {
        const int64_t *now = group->lengths[feature];
        int64_t *made = group->made_lengths[feature];
        for (int64_t at = 0; at < group->num_steps; at++) {
            if (!is_by_row(group->steps[at].what)) continue;
            const Number *numbers = group->numbers + (at * group->num_features + feature) * NUMBERS;
            sizes[feature] = new_lengths(group->steps[at], now, made, group->num_rows, numbers);
            now = made;
        }
    }
}

// All features of a group; 0, or 1 where there is no memory.
extern "C" int hetstream_run(const Group *group) {
    Tile tiles[2];
    Scratch values[2], lengths[2];
    for (int64_t feature = 0; feature < group->num_features; feature++)
        if (!on_feature(*group, feature, tiles, values, lengths)) return 1;
    return 0;
}
