// JPEG to the pixels of a crop that is resized, mirrored and normalised, in one pass: compiled where it runs, by
// `decoder.py`. The decoder is the libjpeg-turbo that Pillow itself has loaded: its functions come as addresses.
//
// Only the rows and columns that the crop needs are decoded. The resize is Pillow's antialiased bilinear one, bit for
// bit: weights in double, rounded to 22 binary digits; columns first, then rows, with whole pixels between the two.
//
// Of a file that is anything but clean the answer is "no", and Pillow says what is wrong with it, or decodes it.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

// --- libjpeg ----------------------------------------------------------------------------------------------------

// The beginning of its structures, which is the same in versions 6.2, 7 and 8 of its interface. It compares version
// and size with its own when a decompressor is made; whether the fields are right, `decoder.py` tries out.
constexpr int COEFFICIENTS = 64;

struct Source {
    const unsigned char *next;
    size_t bytes;
};

struct Jpeg {
    void *errors, *memory, *progress, *client_data;
    int is_decompressor, state;
    Source *source;
    uint32_t image_width, image_height;
    int num_components, jpeg_color_space, out_color_space;
    uint32_t scale_num, scale_denom;
    double output_gamma;
    int buffered_image, raw_data_out, dct_method, fancy_upsampling, block_smoothing;
    int quantize_colors, dither_mode, two_pass_quantize, num_colors, quantizers[3];
    uint32_t output_width, output_height;
    int out_color_components, output_components, rec_outbuf_height, actual_num_colors;
    void *colormap;
    uint32_t output_scanline;
    int input_scan_number;
    uint32_t input_unit_row;
    int output_scan_number;
    uint32_t output_unit_row;
    int (*missing_bits)[COEFFICIENTS];  // of each component; null where the file is not progressive
    unsigned char others[1024];
};

struct Errors {
    void (*exit)(Jpeg *);
    void (*message)(Jpeg *, int level);
    unsigned char others[1024];
};

enum ColorSpace { GRAYSCALE = 1, RGBX = 7 };
constexpr int HEADER_OK = 1;
constexpr int PIXEL_BYTES = 4;  // of a decoded row: its fourth byte has no meaning

struct Functions {
    void *(*std_error)(void *);
    void (*create)(Jpeg *, int version, size_t bytes);
    void (*source)(Jpeg *, const unsigned char *, unsigned long);
    int (*read_header)(Jpeg *, int);
    int (*start)(Jpeg *);
    void (*crop)(Jpeg *, uint32_t *left, uint32_t *width);
    uint32_t (*skip)(Jpeg *, uint32_t);
    uint32_t (*read)(Jpeg *, unsigned char **, uint32_t);
    void (*destroy)(Jpeg *);
};
Functions jpeg;  // the same ones whoever sets them

struct Axis {
    int32_t first, end;  // of the source, what is read
    int32_t num_taps;    // of each result; where it has fewer the last ones weigh nothing
    int32_t *starts;     // of each result, in the source
    int32_t *weights;    // [result][tap]
};

// A file whose header is read. Nothing in it needs a destructor: errors of libjpeg jump.
struct Image {
    Jpeg jpeg;
    Errors errors;
    jmp_buf failed;
    const unsigned char *data;
    bool is_created;
    Axis columns, rows;
    unsigned char *memory;
};

void fail(Jpeg *found) { longjmp(((Image *)found)->failed, 1); }  // it is the first field
void complain(Jpeg *found, int level) {
    if (level < 0) fail(found);  // a warning: the data are damaged
}

// --- resize -----------------------------------------------------------------------------------------------------

constexpr int PRECISION = 32 - 8 - 2;  // of Pillow's weights
constexpr int32_t HALF = 1 << (PRECISION - 1);

// What one result is made of: `size` source pixels from `begin` on become `made` ones, of which `count` are wanted.
bool plan(Axis &axis, double begin, double size, int64_t made, int64_t first, int64_t count, int64_t source_size) {
    double scale = size / made, width = scale < 1 ? 1 : scale, per_width = 1 / width;
    int64_t from = (int64_t)floor(begin), until = (int64_t)ceil(begin + size);
    if (until > source_size) until = source_size;
    int64_t most = (int64_t)ceil(width) * 2 + 1;
    axis.starts = (int32_t *)malloc(count * sizeof(int32_t));
    axis.weights = (int32_t *)calloc(count * most, sizeof(int32_t));
    double *real = (double *)malloc(most * sizeof(double));
    if (!axis.starts || !axis.weights || !real) return free(real), false;
    axis.num_taps = 1;
    for (int64_t at = 0; at < count; at++) {
        // Relative to the crop, as Pillow crops before it resizes.
        double centre = (begin - from) + (first + at + 0.5) * scale, sum = 0;
        int64_t low = (int64_t)(centre - width + 0.5), high = (int64_t)(centre + width + 0.5);
        if (low < 0) low = 0;
        if (high > until - from) high = until - from;
        for (int64_t tap = 0; tap < high - low; tap++) {
            double distance = fabs((tap + low - centre + 0.5) * per_width);
            sum += real[tap] = distance < 1 ? 1 - distance : 0;
        }
        int32_t *weights = axis.weights + at * most;
        for (int64_t tap = 0; tap < high - low; tap++) {
            weights[tap] = (int32_t)(0.5 + (sum != 0 ? real[tap] / sum : real[tap]) * (1 << PRECISION));
            if (weights[tap] && tap >= axis.num_taps) axis.num_taps = (int32_t)tap + 1;
        }
        axis.starts[at] = (int32_t)(from + low);
    }
    free(real);
    for (int64_t at = 0; at < count; at++)
        memmove(axis.weights + at * axis.num_taps, axis.weights + at * most, axis.num_taps * sizeof(int32_t));
    axis.first = axis.starts[0];
    axis.end = axis.starts[count - 1] + axis.num_taps;
    if (axis.end > until) axis.end = (int32_t)until;
    return true;
}

// Four rows at a time: of each column a pixel of each row, which fill a vector.
constexpr int ROWS = 4;
constexpr int LANES = ROWS * PIXEL_BYTES;

// Columns of four decoded rows to those of the result. A pixel is written with its fourth byte: where they lie `step`
// bytes apart, the next pixel writes that again.
template <int TAPS>
void across_by(const Axis &axis, const unsigned char *source, unsigned char *const *made, int64_t count, int64_t step, bool flip) {
    const int taps = TAPS ? TAPS : axis.num_taps;
    for (int64_t at = 0; at < count; at++) {
        int64_t from = flip ? count - 1 - at : at;
        const unsigned char *from_pixels = source + (int64_t)axis.starts[from] * LANES;
        const int32_t *weights = axis.weights + from * taps;
        int32_t sum[LANES];
        unsigned char pixel[LANES];
        for (int lane = 0; lane < LANES; lane++) sum[lane] = HALF;
        for (int tap = 0; tap < taps; tap++, from_pixels += LANES) {
            const int32_t weight = weights[tap];
            for (int lane = 0; lane < LANES; lane++) sum[lane] += from_pixels[lane] * weight;
        }
        for (int lane = 0; lane < LANES; lane++) pixel[lane] = (unsigned char)(sum[lane] >> PRECISION);
        for (int row = 0; row < ROWS; row++) memcpy(made[row] + at * step, pixel + row * PIXEL_BYTES, PIXEL_BYTES);
    }
}

void across(const Axis &axis, const unsigned char *source, unsigned char *const *made, int64_t count, int64_t step, bool flip) {
    const int at = axis.num_taps > 5 ? 0 : axis.num_taps;  // the compiler unrolls what most photographs need
    decltype(&across_by<0>) const by[] = {across_by<0>, across_by<1>, across_by<2>, across_by<3>, across_by<4>, across_by<5>};
    by[at](axis, source, made, count, step, flip);
}

// Four rows of pixels into one of four pixels each.
void interleave(const unsigned char *const *rows, unsigned char *made, int64_t count) {
    const uint32_t *const first = (const uint32_t *)rows[0], *const second = (const uint32_t *)rows[1];
    const uint32_t *const third = (const uint32_t *)rows[2], *const fourth = (const uint32_t *)rows[3];
    uint32_t *const all = (uint32_t *)made;
    for (int64_t at = 0; at < count; at++) {
        all[at * 4] = first[at];
        all[at * 4 + 1] = second[at];
        all[at * 4 + 2] = third[at];
        all[at * 4 + 3] = fourth[at];
    }
}

// Rows to one of the result, which has at least a block.
constexpr int64_t BLOCK = 64;

void down(const int32_t *weights, int taps, const unsigned char *const *rows, unsigned char *made, int64_t width) {
    for (int64_t at = 0; at < width; at += BLOCK) {
        if (at + BLOCK > width) at = width - BLOCK;  // some are computed twice; no row is shorter than a block
        int32_t sum[BLOCK];
        for (int64_t lane = 0; lane < BLOCK; lane++) sum[lane] = HALF;
        for (int tap = 0; tap < taps; tap++) {
            const unsigned char *row = rows[tap] + at;
            const int32_t weight = weights[tap];
            for (int64_t lane = 0; lane < BLOCK; lane++) sum[lane] += row[lane] * weight;
        }
        for (int64_t lane = 0; lane < BLOCK; lane++) made[at + lane] = (unsigned char)(sum[lane] >> PRECISION);
    }
}

// --- what is plain ----------------------------------------------------------------------------------------------

// libjpeg skips what Pillow reads: of a header it would refuse, and of rows that are not needed, the answer is "no", too.

bool begins(const unsigned char *found, int64_t bytes, const char *name, int64_t name_bytes) {
    return bytes >= name_bytes && !memcmp(found, name, name_bytes);
}

int64_t number(const unsigned char *found, int bytes) {
    int64_t value = 0;
    for (int at = 0; at < bytes; at++) value = value << 8 | found[at];
    return value;
}

// An application's segment: long enough for what Pillow reads in it.
bool is_plain_segment(int marker, const unsigned char *found, int64_t bytes) {
    if (marker == 0xe0 && begins(found, bytes, "JFIF", 4)) return bytes >= 7;
    if (marker == 0xee && begins(found, bytes, "Adobe", 5)) return bytes >= 7;
    if (marker == 0xe2 && begins(found, bytes, "ICC_PROFILE", 12)) return bytes >= 14;
    if (marker == 0xe2 && begins(found, bytes, "MPF", 4)) return false;  // several images
    if (marker != 0xed || !begins(found, bytes, "Photoshop 3.0", 14)) return true;
    for (int64_t at = 14; begins(found + at, bytes - at, "8BIM", 4);) {  // number, name, bytes
        int64_t name = at + 6;
        if (name >= bytes) return false;
        int64_t size = name + 1 + found[name];
        size += size & 1;
        if (size + 4 > bytes) return false;
        at = size + 4 + number(found + size, 4);
        at += at & 1;
        if (at > bytes) break;
    }
    return true;
}

bool is_plain_header(const unsigned char *data, int64_t bytes) {
    for (int64_t at = 2; at + 4 <= bytes && data[at] == 0xff;) {
        const int marker = data[at + 1];
        const int64_t size = number(data + at + 2, 2);
        if (size < 2 || at + 2 + size > bytes) return false;
        if (marker == 0xda) return true;  // the rows follow
        const bool is_application = marker >= 0xe0 && marker <= 0xef;
        if (is_application && !is_plain_segment(marker, data + at + 4, size - 2)) return false;
        // A frame, Huffman and quantization tables, restart interval, comment: libjpeg is the stricter reader.
        const bool is_frame = marker >= 0xc0 && marker <= 0xcf && marker != 0xc8;
        if (!is_application && !is_frame && marker != 0xdb && marker != 0xdd && marker != 0xfe) return false;
        at += 2 + size;
    }
    return false;
}

// Whether each scan of a progressive file is there. Else libjpeg smooths over blocks, of those that it decodes alone.
bool is_whole(const Jpeg &decoder) {
    for (int component = 0; decoder.missing_bits && component < decoder.num_components; component++)
        for (int bits : decoder.missing_bits[component])
            if (bits) return false;
    return true;
}

// Whether nothing but rows lies before the end: what Pillow would stumble over there is not decoded here.
bool ends_well(const Image &image) {
    const unsigned char *at = image.jpeg.source->next, *const end = at + image.jpeg.source->bytes;
    if (at - image.data > 1 && at[-2] == 0xff) at -= 2;  // a marker that was read ahead
    while ((at = (const unsigned char *)memchr(at, 0xff, end - at)) && end - at > 1) {
        if (at[1] == 0xd9) return true;
        if (at[1] && at[1] != 0xff && (at[1] < 0xd0 || at[1] > 0xd7)) return false;
        at += at[1] == 0xff ? 1 : 2;
    }
    return false;
}

// --- what a call does -------------------------------------------------------------------------------------------

// What is wanted of an image; decoder.py has the same fields.
struct Wanted {
    int64_t left, top, width, height;   // the crop, in pixels of the file
    int64_t made_width, made_height;    // what it is resized to
    int64_t first_column, first_row;    // the part of that which is the result
    int64_t num_columns, num_rows;
    int64_t flip, may_scale, rows_may_be_first;
    int64_t row_step, column_step, channel_step;  // of the result, in elements
    const float *normalise;  // of float32 results: a factor, then the mean and the deviation of each channel; else null
    void *result;
};

// A row of the result: as it is, or of pixels of four bytes.
void put(const Wanted &wanted, const unsigned char *row, int64_t at, bool is_plain) {
    const int64_t count = wanted.num_columns;
    if (is_plain) {
        memcpy((unsigned char *)wanted.result + at * wanted.row_step, row, count * 3);
        return;
    }
    const uint32_t *pixels = (const uint32_t *)row;
    for (int channel = 0; channel < 3; channel++) {
        const int64_t place = at * wanted.row_step + channel * wanted.channel_step, step = wanted.column_step;
        const int shift = 8 * channel;  // the first byte is the lowest: as on every host that Slurm's GPU nodes have
        if (!wanted.normalise) {
            unsigned char *made = (unsigned char *)wanted.result + place;
            for (int64_t column = 0; column < count; column++) made[column * step] = (unsigned char)(pixels[column] >> shift);
            continue;
        }
        const float factor = wanted.normalise[0], mean = wanted.normalise[1 + channel], deviation = wanted.normalise[4 + channel];
        float *made = (float *)wanted.result + place;
        for (int64_t column = 0; column < count; column++)
            made[column * step] = ((float)(int32_t)(pixels[column] >> shift & 255) * factor - mean) / deviation;
    }
}

int64_t padded(int64_t bytes) { return (bytes + 127) / 64 * 64; }  // at least one byte more, and a block of `down`

// Decode and resize, from the first row that is needed on. `width` columns are decoded.
bool run(Image &image, const Wanted &wanted, int64_t width) {
    const Axis &columns = image.columns, &rows = image.rows;
    const bool is_plain = !wanted.normalise && wanted.channel_step == 1 && wanted.column_step == 3;
    const int64_t tall = wanted.height - wanted.made_height, wide = wanted.width - wanted.made_width;
    const bool rows_first = wanted.rows_may_be_first && tall > 0 && tall > 2 * wide;
    const int64_t step = is_plain ? 3 : PIXEL_BYTES, num_taps = rows.num_taps, num_rows = rows.end - rows.first;
    const int64_t decoded_bytes = padded((width + columns.num_taps) * PIXEL_BYTES), made_bytes = padded(wanted.num_columns * step);
    const int64_t kept = num_taps + ROWS, kept_bytes = rows_first ? decoded_bytes : made_bytes;
    const int64_t all = 2 * ROWS * decoded_bytes + ROWS * made_bytes + kept * kept_bytes + num_taps * sizeof(void *);
    if (!(image.memory = (unsigned char *)calloc(all, 1))) return false;
    unsigned char *interleaved = image.memory;
    unsigned char *decoded[ROWS], *made[ROWS], *slots[ROWS], *next = image.memory + ROWS * decoded_bytes;
    for (int row = 0; row < ROWS; row++, next += decoded_bytes) decoded[row] = next;
    for (int row = 0; row < ROWS; row++, next += made_bytes) made[row] = next;
    unsigned char *const ring = next;
    const unsigned char **taps = (const unsigned char **)(ring + kept * kept_bytes);

    int64_t read = 0, done = 0, waiting = 0;
    while (read < num_rows) {
        const int64_t count = num_rows - read < ROWS ? num_rows - read : ROWS;
        for (int64_t row = 0; row < ROWS; row++) slots[row] = ring + (read + row) % kept * kept_bytes;
        for (int64_t row = 0, got; row < count; row += got)
            if (!(got = jpeg.read(&image.jpeg, (rows_first ? slots : decoded) + row, (uint32_t)(count - row)))) return false;
        if (!rows_first) {
            interleave(decoded, interleaved, width);
            across(columns, interleaved, slots, wanted.num_columns, step, wanted.flip);
        }
        read += count;
        for (; done < wanted.num_rows; done++) {
            const int64_t start = rows.starts[done] - rows.first;
            if ((start + num_taps < num_rows ? start + num_taps : num_rows) > read) break;
            for (int64_t tap = 0; tap < num_taps; tap++)  // what is behind the last row weighs nothing
                taps[tap] = ring + (start + tap < num_rows ? start + tap : num_rows - 1) % kept * kept_bytes;
            unsigned char *line = rows_first ? decoded[waiting] : made[0];
            const int64_t bytes = rows_first ? width * PIXEL_BYTES : wanted.num_columns * step;
            const bool is_there = is_plain && !rows_first && bytes >= BLOCK;
            if (is_there) line = (unsigned char *)wanted.result + done * wanted.row_step;
            down(rows.weights + done * num_taps, (int)num_taps, taps, line, bytes < BLOCK ? BLOCK : bytes);
            if (!rows_first) {
                if (!is_there) put(wanted, line, done, is_plain);
            } else if (++waiting == ROWS || done + 1 == wanted.num_rows) {
                interleave(decoded, interleaved, width);
                across(columns, interleaved, made, wanted.num_columns, step, wanted.flip);
                for (int64_t row = 0; row < waiting; row++) put(wanted, made[row], done + 1 - waiting + row, is_plain);
                waiting = 0;
            }
        }
    }
    return done == wanted.num_rows;
}

bool make(Image &image, const Wanted &wanted) {
    Jpeg &decoder = image.jpeg;
    // Half, a quarter or an eighth in each direction, where the crop still has as many pixels as the result.
    int64_t eighths = 8;
    while (wanted.may_scale && eighths > 1 && wanted.width * (eighths / 2) >= wanted.made_width * 8 &&
           wanted.height * (eighths / 2) >= wanted.made_height * 8)
        eighths /= 2;
    decoder.scale_num = (uint32_t)eighths;
    decoder.scale_denom = 8;
    decoder.out_color_space = RGBX;
    if (!jpeg.start(&decoder) || !is_whole(decoder)) return false;
    const double scale = (double)eighths / 8;
    const int64_t whole_width = decoder.output_width, whole_height = decoder.output_height;
    if (!plan(image.columns, wanted.left * scale, wanted.width * scale, wanted.made_width, wanted.first_column,
              wanted.num_columns, whole_width) ||
        !plan(image.rows, wanted.top * scale, wanted.height * scale, wanted.made_height, wanted.first_row,
              wanted.num_rows, whole_height))
        return false;

    // Two columns more on either side: at the edge of what is decoded, libjpeg has no neighbour for the colours.
    const int64_t from = image.columns.first > 2 ? image.columns.first - 2 : 0;
    const int64_t until = image.columns.end + 2 < whole_width ? image.columns.end + 2 : whole_width;
    uint32_t left = (uint32_t)from, width = (uint32_t)(until - from);
    if (width < whole_width) jpeg.crop(&decoder, &left, &width);
    for (int64_t at = 0; at < wanted.num_columns; at++) image.columns.starts[at] -= (int32_t)left;
    if (image.rows.first) jpeg.skip(&decoder, (uint32_t)image.rows.first);
    if (!run(image, wanted, width)) return false;
    return ends_well(image);
}

}  // namespace

extern "C" {

void hetstream_jpeg_use(const Functions *functions) { jpeg = *functions; }

void hetstream_jpeg_close(Image *image) {
    if (!image) return;
    if (image->is_created) jpeg.destroy(&image->jpeg);
    void *const owned[] = {image->columns.starts, image->columns.weights, image->rows.starts,
                           image->rows.weights, image->memory};
    for (void *each : owned) free(each);
    free(image);
}

// A file's header; null where it is not a plain one of grey or of three colours. `data` must stay until it is closed.
Image *hetstream_jpeg_open(int version, int64_t struct_bytes, const unsigned char *data, int64_t bytes,
                           int64_t *width_and_height) {
    Image *image = is_plain_header(data, bytes) ? (Image *)calloc(1, sizeof(Image)) : 0;
    if (!image) return 0;
    image->jpeg.errors = jpeg.std_error(&image->errors);
    image->errors.exit = fail;
    image->errors.message = complain;
    if (setjmp(image->failed)) return hetstream_jpeg_close(image), (Image *)0;
    jpeg.create(&image->jpeg, version, (size_t)struct_bytes);
    image->is_created = true;
    image->data = data;
    jpeg.source(&image->jpeg, data, (unsigned long)bytes);
    if (jpeg.read_header(&image->jpeg, 1) != HEADER_OK || (image->jpeg.num_components != 1 && image->jpeg.num_components != 3))
        return hetstream_jpeg_close(image), (Image *)0;
    width_and_height[0] = image->jpeg.image_width;
    width_and_height[1] = image->jpeg.image_height;
    return image;
}

// Whether the result was made. Once for an image.
int hetstream_jpeg_make(Image *image, const Wanted *wanted) {
    if (setjmp(image->failed)) return 0;
    return make(*image, *wanted);
}
}
