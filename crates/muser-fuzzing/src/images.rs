//! Pictures: PNG, JPEG, GIF and WebP.

use muser_image::limits::{MAX_PIXELS, MAX_SIDE};
use muser_image::{Grid, decode, probe};

use crate::{Target, check_message, golden};

/// Bytes that a decoder may hold beside what the header announces: an inflated profile, its tables.
const BESIDE: u64 = 66 << 20;

/// A picture: header and pixels agree, memory is what the header announced, the same comes out twice.
pub const IMAGES: Target = Target {
    name: "images",
    about: "header and pixels agree, memory is what was announced, decoding twice gives the same",
    run: images,
    seeds,
    words: &[
        "IHDR",
        "IDAT",
        "IEND",
        "PLTE",
        "tRNS",
        "acTL",
        "iCCP",
        "eXIf",
        "GIF89a",
        "RIFF",
        "WEBPVP8 ",
        "VP8L",
        "VP8X",
        "ANMF",
        "\\xff\\xd8",
        "\\xff\\xc0",
        "\\xff\\xc2",
        "\\xff\\xda",
        "\\xff\\xc4",
    ],
    max_len: 4096,
    memory: (512 << 20, 4096),
    millis: (4000, 200),
};

fn images(data: &[u8]) {
    let Some((mend, bytes)) = data.split_first() else { return };
    // A PNG's sums are made good for half of the inputs, or no change would be seen behind the first chunk.
    let mended = (mend & 1 == 1).then(|| mend_sums(bytes)).flatten();
    let bytes = mended.as_deref().unwrap_or(bytes);
    let header = match probe(bytes) {
        Ok(header) => header,
        Err(error) => {
            check_message(&error.to_string());
            assert!(decode(bytes).is_err(), "what has no header has no pixels");
            return;
        }
    };
    let pixels = u64::from(header.width) * u64::from(header.height);
    assert!(header.width > 0 && header.height > 0 && header.width <= MAX_SIDE && header.height <= MAX_SIDE);
    assert!(pixels <= MAX_PIXELS, "{header:?}");
    let grid = Grid::choose(header.width, header.height, 28, 4096);
    assert!((1..=4096).contains(&grid.tokens()), "{header:?}");
    if pixels > 1 << 18 {
        return;
    }
    let (decoded, held) = muser_testkit::most_held(|| decode(bytes));
    assert!(held <= header.memory + BESIDE, "{held} bytes held, {header:?}");
    match &decoded {
        Ok(picture) => {
            assert_eq!((picture.width, picture.height), (header.width, header.height));
            assert_eq!(picture.rgb.len() as u64, pixels * 3);
        }
        Err(error) => check_message(&error.to_string()),
    }
    assert_eq!(decode(bytes), decoded);
}

/// Gives the chunks of a PNG sums that fit.
fn mend_sums(bytes: &[u8]) -> Option<Vec<u8>> {
    const MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";
    let mut rest = bytes.strip_prefix(MAGIC)?;
    let mut out = MAGIC.to_vec();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        let (kind, after) = after.split_first_chunk::<4>()?;
        let data = &after[..length.min(after.len())];
        out.extend((data.len() as u32).to_be_bytes());
        let from = out.len();
        out.extend(kind);
        out.extend(data);
        let mut sum = flate2::Crc::new();
        sum.update(&out[from..]);
        out.extend(sum.sum().to_be_bytes());
        rest = after.get(data.len() + 4..).unwrap_or_default();
    }
    Some(out)
}

fn seeds() -> Vec<Vec<u8>> {
    let names = [
        "rgb.png",
        "interlaced-4bit.png",
        "palette8.png",
        "greya.png",
        "turned8.png",
        "one.gif",
        "interlaced.gif",
        "clear.gif",
        "grey.jpg",
        "jq30.jpg",
        "progressive.jpg",
        "restarts.jpg",
        "cmyk.jpg",
        "turned.jpg",
        "lossless.webp",
        "lossless-alpha.webp",
        "lossy.webp",
        "lossy-alpha.webp",
        "moving.webp",
        "turned.webp",
    ];
    let read = |name: &&str| golden(&format!("muser-image/tests/golden/decode/{name}"));
    names.iter().map(read).map(|bytes| [&[1][..], &bytes].concat()).collect()
}
