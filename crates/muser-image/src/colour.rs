//! From a decoder's samples to RGB of 8 bits: grey is spread, of 16 bits the upper 8 count, what is transparent lies on white.

use image::ColorType;

/// `samples` as the decoder wrote them (16-bit ones in the machine's order); `None` if the decoder has no business with the type.
pub(crate) fn to_rgb(samples: Vec<u8>, color: ColorType) -> Option<Vec<u8>> {
    let rgb = match color {
        ColorType::Rgb8 => samples,
        ColorType::L8 => pixels::<1>(&samples, |[l]| [l; 3]),
        ColorType::La8 => pixels::<2>(&samples, |[l, a]| over_white([l; 3], a)),
        ColorType::Rgba8 => pixels::<4>(&samples, |[r, g, b, a]| over_white([r, g, b], a)),
        ColorType::L16 => pixels::<1>(&upper(&samples), |[l]| [l; 3]),
        ColorType::La16 => pixels::<2>(&upper(&samples), |[l, a]| over_white([l; 3], a)),
        ColorType::Rgb16 => upper(&samples),
        ColorType::Rgba16 => pixels::<4>(&upper(&samples), |[r, g, b, a]| over_white([r, g, b], a)),
        _ => return None,
    };
    Some(rgb)
}

fn pixels<const N: usize>(samples: &[u8], rgb: impl Fn([u8; N]) -> [u8; 3]) -> Vec<u8> {
    let mut out = Vec::with_capacity(samples.len() / N * 3);
    samples.as_chunks::<N>().0.iter().for_each(|pixel| out.extend(rgb(*pixel)));
    out
}

fn upper(samples: &[u8]) -> Vec<u8> {
    samples.as_chunks::<2>().0.iter().map(|pair| (u16::from_ne_bytes(*pair) >> 8) as u8).collect()
}

/// (c a + 255 (255 - a)) / 255, the half rounded up; it cannot occur, 255 being odd.
fn over_white(rgb: [u8; 3], alpha: u8) -> [u8; 3] {
    let alpha = u32::from(alpha);
    rgb.map(|c| ((u32::from(c) * alpha + 255 * (255 - alpha) + 127) / 255) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shows_white_and_all_shows_itself() {
        assert_eq!(over_white([1, 2, 3], 0), [255; 3]);
        assert_eq!(over_white([1, 2, 3], 255), [1, 2, 3]);
        // 0.5 * 10 + 0.5 * 255 with a = 127 and 128.
        assert_eq!(over_white([10, 0, 255], 127), [133, 128, 255]);
        assert_eq!(over_white([10, 0, 255], 128), [132, 127, 255]);
    }

    #[test]
    fn every_type_of_a_decoder_becomes_rgb() {
        let wide = |values: &[u16]| values.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
        let rows: Vec<(ColorType, Vec<u8>, [u8; 3])> = vec![
            (ColorType::L8, vec![7], [7; 3]),
            (ColorType::La8, vec![7, 255], [7; 3]),
            (ColorType::Rgb8, vec![1, 2, 3], [1, 2, 3]),
            (ColorType::Rgba8, vec![1, 2, 3, 0], [255; 3]),
            (ColorType::L16, wide(&[0x12ff]), [0x12; 3]),
            (ColorType::La16, wide(&[0x12ff, 0xffff]), [0x12; 3]),
            (ColorType::Rgb16, wide(&[0x0180, 0x0280, 0xffff]), [1, 2, 255]),
            (ColorType::Rgba16, wide(&[0x0180, 0x0280, 0xffff, 0x00ff]), [255; 3]),
        ];
        for (color, samples, expected) in rows {
            assert_eq!(to_rgb(samples, color), Some(expected.to_vec()), "{color:?}");
        }
        assert_eq!(to_rgb(vec![0; 12], ColorType::Rgb32F), None);
    }
}
