//! Pictures in requests: from what an API calls an image to what the engine's tower takes.
//!
//! An image comes as bytes, in base64, and never as an address: nothing is fetched for anybody. Its header is read at the door,
//! which is enough to count its tokens; it is decoded when the prompt is known to fit, on a thread that may block, within one
//! budget of memory for all requests.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use muser_backend::{TowerImage, TowerInfo, picture_digest};
use muser_engine::{ImageRows, ImageSource};
use muser_image::{Grid, Header, ImageError, PREPROCESSING};
use serde_json::{Value, json};

use crate::error::ApiError;

/// Most images of a request.
pub const MOST_IMAGES: usize = 32;
/// Most tokens of an image, unless the operator says otherwise.
pub const MOST_TOKENS: u32 = 4096;
/// Most tokens of an image that is asked for with `detail` low.
const LOW_TOKENS: u32 = 256;
/// Memory for decoding, of all requests together.
const DECODING_BYTES: u64 = 1 << 30;

/// The key of a part with the name of the field that a client wrote, where that is another.
pub(crate) const PLACE: &str = "muser_place";
/// The key of a part of which a model that sees nothing is told, in place of a refusal.
pub(crate) const TOLD: &str = "muser_told";

/// Padding or none: clients send both.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// An image of a request.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    bytes: Arc<[u8]>,
    low: bool,
    /// The client's name for it.
    pub place: String,
    /// A model that sees nothing is told that it was there.
    pub told: bool,
}

impl std::fmt::Debug for Picture {
    // No pixels: requests end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Picture").field("bytes", &self.bytes.len()).field("place", &self.place).finish()
    }
}

impl Picture {
    /// From base64, or a data URL with it.
    pub fn from_text(text: &str, place: impl Into<String>) -> Result<Self, ApiError> {
        let place = place.into();
        let fault = |message: &str| Err(ApiError::field(&place, message));
        let encoded = match text.split_once(':') {
            Some(("data", rest)) => match rest.split_once(',') {
                Some((kind, data)) if kind.ends_with(";base64") => data,
                _ => {
                    return fault(
                        "An image's data URL must read data:image/png;base64, and the image in base64",
                    );
                }
            },
            Some(_) => {
                let short: String = text.chars().take(40).collect();
                return Err(ApiError::unsupported(
                    &place,
                    format!(
                        "This server fetches nothing, so the address {} is of no use to it: send the image itself as a data URL \
                         (data:image/png;base64,...)",
                        Value::from(short)
                    ),
                ));
            }
            None => text,
        };
        let packed: Vec<u8> = encoded.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        match BASE64.decode(packed) {
            Ok(bytes) => Ok(Self { bytes: bytes.into(), low: false, place, told: false }),
            Err(error) => Err(ApiError::field(&place, format!("The image is not valid base64: {error}"))),
        }
    }

    /// From a part of a message in one of OpenAI's shapes.
    fn from_part(part: &Value, place: &str) -> Result<Self, ApiError> {
        let place = part[PLACE].as_str().unwrap_or(place);
        let image = &part["image_url"];
        let Some(url) = image.as_str().or_else(|| image["url"].as_str()) else {
            let message =
                "An image needs 'image_url' with a data URL; this server keeps no files to refer to";
            return Err(ApiError::field(place, message));
        };
        let mut picture = Self::from_text(url, place)?;
        picture.low = image["detail"] == "low" || part["detail"] == "low";
        picture.told = part[TOLD] == true;
        Ok(picture)
    }
}

/// A part with an image, for [`of_messages`].
pub(crate) fn part(data: &str, place: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": data}, PLACE: place})
}

/// Does a part of this type hold an image?
pub(crate) fn is_image(kind: &Value) -> bool {
    matches!(kind.as_str(), Some("image" | "image_url" | "input_image"))
}

/// The images of messages as they came, in the order of messages and parts.
pub(crate) fn of_messages(messages: &[Value]) -> Result<Vec<Picture>, ApiError> {
    let mut found = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        for (at, part) in message["content"].as_array().into_iter().flatten().enumerate() {
            if !is_image(&part["type"]) {
                continue;
            }
            let place = format!("messages[{index}].content[{at}]");
            if role == "assistant" {
                return Err(ApiError::unsupported(
                    place,
                    "Only a user, a tool or a system message may show an image",
                ));
            }
            if found.len() == MOST_IMAGES {
                let message = format!("At most {MOST_IMAGES} images are taken in a request");
                return Err(ApiError::field(place, message));
            }
            let mut picture = Picture::from_part(part, &place)?;
            // What a tool gave back is not the user's doing: an agent that looked at a picture goes on with its session.
            picture.told |= matches!(role, "tool" | "function");
            found.push(picture);
        }
    }
    Ok(found)
}

/// What becomes of images with the loaded model.
#[derive(Clone, Debug)]
pub enum Pictures {
    /// They are refused, for this reason.
    Absent(String),
    /// They are shown.
    Shown(Reader),
}

impl Default for Pictures {
    fn default() -> Self {
        Self::Absent(
            "The loaded model sees no images: no projector belongs to it (muser serve --mmproj FILE)".into(),
        )
    }
}

/// Makes what the tower takes of pictures.
#[derive(Clone, Debug)]
pub struct Reader {
    tower: TowerInfo,
    most_tokens: u32,
    room: Arc<Room>,
}

impl Reader {
    /// For a tower; a picture has at most `most_tokens` tokens.
    pub fn new(tower: TowerInfo, most_tokens: u32) -> Self {
        let most_tokens = most_tokens.clamp(1, MOST_TOKENS);
        Self { tower, most_tokens, room: Arc::new(Room::new(DECODING_BYTES)) }
    }

    fn cap(&self, low: bool) -> u32 {
        if low { self.most_tokens.min(LOW_TOKENS) } else { self.most_tokens }
    }

    /// The tokens that an encoded picture becomes, from its header alone.
    pub fn measure(&self, bytes: &[u8], low: bool) -> Result<(Header, Grid), ImageError> {
        let header = muser_image::probe(bytes)?;
        Ok((header, Grid::choose(header.width, header.height, self.tower.unit, self.cap(low))))
    }

    /// Decodes and resamples a picture; its digest covers all that its rows depend on.
    pub fn read(&self, bytes: &[u8], low: bool) -> Result<(TowerImage, [u8; 32]), ImageError> {
        let (header, _) = self.measure(bytes, low)?;
        let _room = self.room.take(header.memory);
        let picture = muser_image::decode(bytes)?;
        let cap = self.cap(low);
        let sides = (picture.width, picture.height);
        let digest = picture_digest(&self.tower.route, PREPROCESSING, cap, sides, &picture.rgb);
        let resized = picture.resize(self.tower.unit, cap)?;
        let (rows, cols) = (resized.grid.rows as usize, resized.grid.cols as usize);
        Ok((TowerImage { rows, cols, rgb: resized.rgb.into() }, digest))
    }

    /// Rows of a picture of a request.
    pub(crate) fn rows(&self, picture: &Picture) -> Result<usize, ApiError> {
        let fault = |error: ImageError| image_fault(picture, &error);
        self.measure(&picture.bytes, picture.low).map(|(_, grid)| grid.tokens() as usize).map_err(fault)
    }

    /// A picture of a request whose first row is at position `at`.
    pub(crate) fn placed(&self, picture: &Picture, at: usize) -> Result<ImageRows, ApiError> {
        let fault = |error: ImageError| image_fault(picture, &error);
        let (image, digest) = self.read(&picture.bytes, picture.low).map_err(fault)?;
        Ok(ImageRows { at, source: ImageSource::Picture(image), digest })
    }
}

fn image_fault(picture: &Picture, error: &ImageError) -> ApiError {
    let text = error.to_string();
    let mut chars = text.chars();
    let sentence = chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect());
    ApiError::field(&picture.place, sentence)
}

/// Memory that decoding may take. Whoever waits for it waits for decoders that need nothing further.
#[derive(Debug)]
struct Room {
    total: u64,
    taken: Mutex<u64>,
    changed: Condvar,
}

struct Taken<'a>(&'a Room, u64);

impl Room {
    fn new(total: u64) -> Self {
        Self { total, taken: Mutex::new(0), changed: Condvar::new() }
    }

    /// Waits for so many bytes; for all there are, if it is more.
    fn take(&self, bytes: u64) -> Taken<'_> {
        let bytes = bytes.min(self.total);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken + bytes > self.total {
            taken = self.changed.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += bytes;
        Taken(self, bytes)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_as_base64_and_never_by_address() {
        let check =
            |text: &str, expected: Result<&[u8], &str>| match (Picture::from_text(text, "x"), expected) {
                (Ok(picture), Ok(bytes)) => assert_eq!(&*picture.bytes, bytes, "{text}"),
                (Err(fault), Err(part)) => {
                    assert_eq!((fault.status.as_u16(), fault.param.as_deref()), (400, Some("x")));
                    assert!(fault.message.contains(part), "{text}: {}", fault.message);
                }
                (found, _) => panic!("{text}: {found:?}"),
            };
        check("data:image/png;base64,AQID", Ok(&[1, 2, 3]));
        check("data:;base64,AQID", Ok(&[1, 2, 3]));
        check("data:image/jpeg;charset=x;base64,AQI=", Ok(&[1, 2]));
        check("AQI", Ok(&[1, 2]));
        check("AQ\r\n I=", Ok(&[1, 2]));
        check("data:image/png,AQID", Err("data URL must read"));
        check("data:image/png;base64", Err("data URL must read"));
        check("http://127.0.0.1/a.png", Err("fetches nothing"));
        check("https://x/y.png", Err("https://x/y.png"));
        check("file:///etc/passwd", Err("fetches nothing"));
        check("ftp://x", Err("fetches nothing"));
        check("AQ$", Err("not valid base64"));
    }

    #[test]
    fn decoders_wait_for_room() {
        let room = Room::new(10);
        let first = room.take(6);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| drop(room.take(50)));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!second.is_finished(), "it needs all there is");
            drop(room.take(4));
            drop(first);
        });
        assert_eq!(*room.taken.lock().expect("whole"), 0);
    }
}
