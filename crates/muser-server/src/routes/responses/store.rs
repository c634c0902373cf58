//! Responses that were given out, so that a client may go on from one by its id.
//!
//! In memory, for the life of the process, within a number and a size: the oldest go first. A response holds what came
//! before it, so a conversation stays whole as long as its last response is there. Each belongs to the key that made it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

/// Whose responses these are: a digest of the key, or nothing where no key is asked for.
pub type Owner = Option<[u8; 32]>;

/// Most responses.
const MOST: usize = 1024;
/// Most bytes of them all.
const MOST_BYTES: usize = 64 << 20;

/// A response with what it answered.
#[derive(Debug)]
pub struct Kept {
    /// JSON text: a parsed tree takes several times the memory.
    response: Box<str>,
    input: Box<str>,
    before: Option<Arc<Kept>>,
    total: Arc<AtomicUsize>,
}

impl Kept {
    fn bytes(&self) -> usize {
        self.response.len() + self.input.len()
    }

    /// The response as it was given out.
    pub fn response(&self) -> Value {
        serde_json::from_str(&self.response).unwrap_or_default()
    }

    /// The items that it answered, without those before.
    pub fn input(&self) -> Vec<Value> {
        serde_json::from_str(&self.input).unwrap_or_default()
    }

    /// All items up to and including its own output, oldest first.
    pub fn items(&self) -> Vec<Value> {
        let mut chain = vec![self];
        while let Some(before) = chain.last().and_then(|last| last.before.as_deref()) {
            chain.push(before);
        }
        let mut items = Vec::new();
        for kept in chain.into_iter().rev() {
            items.extend(kept.input());
            if let Value::Array(output) = kept.response()["output"].take() {
                items.extend(output);
            }
        }
        items
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes(), Ordering::Relaxed);
        // One after the other: a long conversation would overflow the stack.
        let mut next = self.before.take();
        while let Some(mut kept) = next.and_then(Arc::into_inner) {
            next = kept.before.take();
        }
    }
}

#[derive(Debug, Default)]
struct Shelf {
    kept: HashMap<(Owner, String), Arc<Kept>>,
    order: VecDeque<(Owner, String)>,
}

/// The store.
#[derive(Debug)]
pub struct Responses {
    shelf: Mutex<Shelf>,
    total: Arc<AtomicUsize>,
    most: usize,
    most_bytes: usize,
}

impl Default for Responses {
    fn default() -> Self {
        Self::with_limits(MOST, MOST_BYTES)
    }
}

impl Responses {
    fn with_limits(most: usize, most_bytes: usize) -> Self {
        Self { shelf: Mutex::default(), total: Arc::default(), most, most_bytes }
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response to `input`, after `before`.
    pub fn keep(&self, owner: Owner, response: &Value, input: &[Value], before: Option<Arc<Kept>>) {
        let Some(id) = response["id"].as_str().map(str::to_owned) else { return };
        let response = response.to_string().into_boxed_str();
        let input = Value::from(input.to_vec()).to_string().into_boxed_str();
        let kept = Kept { response, input, before, total: Arc::clone(&self.total) };
        self.total.fetch_add(kept.bytes(), Ordering::Relaxed);
        let mut shelf = self.shelf();
        shelf.order.push_back((owner, id.clone()));
        shelf.kept.insert((owner, id), Arc::new(kept));
        while shelf.order.len() > self.most || self.total.load(Ordering::Relaxed) > self.most_bytes {
            let Some(oldest) = shelf.order.pop_front() else { break };
            // One that another holds frees nothing yet; then the next oldest goes too.
            shelf.kept.remove(&oldest);
        }
    }

    /// A response of this owner.
    pub fn get(&self, owner: Owner, id: &str) -> Option<Arc<Kept>> {
        self.shelf().kept.get(&(owner, id.to_owned())).cloned()
    }

    /// Removes one; `false` if there is none.
    pub fn delete(&self, owner: Owner, id: &str) -> bool {
        let key = (owner, id.to_owned());
        let mut shelf = self.shelf();
        shelf.order.retain(|other| *other != key);
        let removed = shelf.kept.remove(&key);
        drop(shelf);
        removed.is_some()
    }

    /// An item of any response of this owner, given out or sent in.
    pub fn item(&self, owner: Owner, id: &str) -> Option<Value> {
        // An item that was given out names its response. Others are looked for, the newest first.
        let rest = id.split_once('_').and_then(|(_, rest)| rest.rsplit_once('_'));
        let made_by = rest.and_then(|(response, _)| self.get(owner, &format!("resp_{response}")));
        let named = |item: &Value| item["id"].as_str() == Some(id);
        if let Some(kept) = made_by
            && let Some(item) = kept.response()["output"].as_array()?.iter().find(|item| named(item))
        {
            return Some(item.clone());
        }
        let quoted = Value::from(id).to_string();
        let shelf = self.shelf();
        let own = shelf.order.iter().rev().filter(|key| key.0 == owner).filter_map(|key| shelf.kept.get(key));
        let kept: Vec<Arc<Kept>> = own.filter(|kept| kept.input.contains(&quoted)).cloned().collect();
        drop(shelf);
        kept.iter().find_map(|kept| kept.input().into_iter().find(named))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn response(id: &str, text: &str) -> Value {
        let item = format!("msg_{}_0", id.trim_start_matches("resp_"));
        json!({"id": id, "output": [{"type": "message", "id": item, "content": text}]})
    }

    fn user(text: &str) -> Vec<Value> {
        vec![json!({"role": "user", "id": format!("in_{text}"), "content": text})]
    }

    #[test]
    fn a_conversation_is_whole_and_belongs_to_one_key() {
        let store = Responses::default();
        store.keep(None, &response("resp_1", "A"), &user("a"), None);
        store.keep(None, &response("resp_2", "B"), &user("b"), store.get(None, "resp_1"));
        assert!(store.delete(None, "resp_1"));
        assert!(!store.delete(None, "resp_1"));
        let items = store.get(None, "resp_2").expect("kept").items();
        let said: Vec<&str> = items.iter().filter_map(|item| item["content"].as_str()).collect();
        assert_eq!(said, ["a", "A", "b", "B"]);
        assert!(store.get(Some([1; 32]), "resp_2").is_none());
        assert!(store.item(Some([1; 32]), "msg_2_0").is_none());
        assert!(!store.delete(Some([1; 32]), "resp_2"));
        assert_eq!(store.item(None, "msg_2_0").expect("made")["content"], "B");
        assert_eq!(store.item(None, "in_b").expect("sent")["content"], "b");
        assert_eq!(store.item(None, "in_c"), None);
        assert_eq!(store.item(None, "rs_9_0"), None);
    }

    #[test]
    fn number_and_bytes_are_bounded_and_counted() {
        let store = Responses::with_limits(10, 4000);
        let mut last = None;
        for index in 0..2000 {
            let id = format!("resp_{index}");
            store.keep(None, &response(&id, "text"), &user("question"), last.take());
            // Every second conversation goes on for ever.
            last = store.get(None, &id).filter(|_| index % 500 != 0);
            let shelf = store.shelf();
            assert!(shelf.order.len() <= 10 && shelf.order.len() == shelf.kept.len());
        }
        drop(last);
        assert!(store.total.load(Ordering::Relaxed) <= 4000);
        store.keep(None, &response("resp_long", &"x".repeat(5000)), &[], None);
        assert!(store.get(None, "resp_long").is_none(), "one that is too long is not kept");
        assert_eq!(store.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn as_many_are_kept_as_the_limits_say_and_the_oldest_goes() {
        let keep = |store: &Responses| {
            let ids = ["resp_1", "resp_2", "resp_3"];
            ids.iter().for_each(|id| store.keep(None, &response(id, "x"), &user("a"), None));
            ids.map(|id| store.get(None, id).is_some())
        };
        let all = Responses::default();
        assert_eq!(keep(&all), [true; 3]);
        let bytes = all.total.load(Ordering::Relaxed);
        for (limits, kept) in [((3, bytes), [true; 3]), ((2, bytes), [false, true, true])] {
            assert_eq!(keep(&Responses::with_limits(limits.0, limits.1)), kept, "{limits:?}");
        }
        assert_eq!(keep(&Responses::with_limits(3, bytes - 1)), [false, true, true]);
    }

    #[test]
    fn a_long_conversation_goes_without_overflow() {
        let store = Responses::with_limits(10, 64 << 20);
        let mut before = None;
        for index in 0..100_000 {
            let id = format!("resp_{index}");
            store.keep(None, &json!({"id": id, "output": []}), &[], before.take());
            before = store.get(None, &id);
        }
        drop(before);
        drop(store);
    }
}
