/* Vectorized draws of torch's CPU generator, the MT19937 of Matsumoto and Nishimura (1998).

   torch makes one draw at a time: it combines two 32-bit outputs of the generator into a 53-bit integer. The element is
   1 if that is below the probability. Here, all 624 outputs are generated, tempered and compared by vectors. */
#include <stdint.h>

#define N 624
#define M 397

static inline uint32_t twisted(uint32_t word, uint32_t next, uint32_t far) {
    uint32_t joined = (word & 0x80000000u) | (next & 0x7fffffffu);
    return far ^ (joined >> 1) ^ ((0u - (next & 1u)) & 0x9908b0dfu);
}

/* The second and third loops read elements at a distance of N - M, which is larger than a vector. */
static void twist(uint32_t *mt) {
    int i;
    for (i = 0; i < N - M; i++) mt[i] = twisted(mt[i], mt[i + 1], mt[i + M]);
#pragma GCC ivdep
    for (i = N - M; i < 2 * (N - M); i++) mt[i] = twisted(mt[i], mt[i + 1], mt[i + M - N]);
#pragma GCC ivdep
    for (i = 2 * (N - M); i < N - 1; i++) mt[i] = twisted(mt[i], mt[i + 1], mt[i + M - N]);
    mt[N - 1] = twisted(mt[N - 1], mt[0], mt[M - 1]);
}

static void temper(const uint32_t *mt, uint32_t *words) {
    for (int i = 0; i < N; i++) {
        uint32_t y = mt[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        words[i] = y ^ (y >> 18);
    }
}

static void compare(const uint32_t *words, uint8_t *bits, int count, uint64_t threshold) {
    uint32_t high = (uint32_t)(threshold >> 32), low = (uint32_t)threshold;
    for (int i = 0; i < count; i++) {
        uint32_t first = words[2 * i] & 0x1fffffu, second = words[2 * i + 1];
        bits[i] = (uint8_t)((first < high) | ((first == high) & (second < low)));
    }
}

#define WRITE(type)                                                                                                    \
    {                                                                                                                  \
        type *place = (type *)out + at;                                                                                \
        for (int i = 0; i < count; i++) place[i] = (type)((type)0 - (type)bits[i]) & (type)one;                        \
    }

static void write(const uint8_t *bits, void *out, int64_t at, int count, int itemsize, uint64_t one) {
    switch (itemsize) {
        case 1: WRITE(uint8_t) break;
        case 2: WRITE(uint16_t) break;
        case 4: WRITE(uint32_t) break;
        case 8: WRITE(uint64_t) break;
    }
}

/* Fills `out` with `count` draws: with probability threshold / 2^53, `one` (the bits of a 1 of `itemsize` bytes),
   otherwise 0. `state` holds the 624 integers of the generator, and `start` the index of the next one (624 if a twist
   is due). Advances the state and returns the new index. */
int draw_bernoulli(uint64_t *state, int64_t start, void *out, int64_t count, int64_t itemsize, uint64_t one,
                   uint64_t threshold) {
    uint32_t mt[N], words[N], straddling[2];
    uint8_t bits[N / 2];
    int64_t done = 0;
    int next = (int)start;
    for (int i = 0; i < N; i++) mt[i] = (uint32_t)state[i];
    temper(mt, words);
    while (done < count) {
        int left = N - next;
        if (left < 2) { /* the next pair has one or no integer from the old state */
            if (left) straddling[0] = words[next];
            twist(mt);
            temper(mt, words);
            next = 0;
            if (left) {
                straddling[1] = words[next++];
                compare(straddling, bits, 1, threshold);
                write(bits, out, done++, 1, itemsize, one);
            }
            continue;
        }
        int pairs = count - done < left / 2 ? (int)(count - done) : left / 2;
        compare(words + next, bits, pairs, threshold);
        write(bits, out, done, pairs, itemsize, one);
        next += 2 * pairs;
        done += pairs;
    }
    for (int i = 0; i < N; i++) state[i] = mt[i];
    return next;
}
