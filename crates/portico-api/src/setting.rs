//! A field that may hold a mistake without the whole document being lost.
//!
//! A typing mistake in one field must become a message that names the field, not a parse error for the
//! object. [`Setting`] holds the text for validation and the value for planning.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The content of a field: nothing, a value, or a text that is no such value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Setting<T> {
    /// Absent, `null` or empty: the three are the same, as in the Kubernetes API.
    #[default]
    Unset,
    /// A value.
    Good(T),
    /// A text that is no value of this kind.
    Bad(Box<BadSetting>),
}

/// A text that could not be understood.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BadSetting {
    /// The text as written, or `a list`, `a map`.
    pub value: Box<str>,
    /// Why it is no value of this kind.
    pub why: Box<str>,
}

impl<T> Setting<T> {
    /// The value, if it is valid.
    pub fn get(&self) -> Option<&T> {
        match self {
            Self::Good(value) => Some(value),
            Self::Unset | Self::Bad(_) => None,
        }
    }

    /// The text, if it is not valid.
    pub fn bad(&self) -> Option<&BadSetting> {
        match self {
            Self::Bad(bad) => Some(bad),
            Self::Unset | Self::Good(_) => None,
        }
    }

    /// Whether the field is absent or empty.
    pub fn is_unset(&self) -> bool {
        matches!(self, Self::Unset)
    }
}

impl<T> Setting<T>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    /// Reads the `text` of a manifest.
    pub fn read(text: &str) -> Self {
        if text.is_empty() {
            return Self::Unset;
        }
        match text.parse() {
            Ok(value) => Self::Good(value),
            Err(why) => Self::Bad(Box::new(BadSetting { value: text.into(), why: why.to_string().into() })),
        }
    }

    fn misplaced(what: &str) -> Self {
        let why = "one value belongs here";
        Self::Bad(Box::new(BadSetting { value: what.into(), why: why.into() }))
    }
}

impl<'de, T> Deserialize<'de> for Setting<T>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyScalar(PhantomData))
    }
}

/// A valid value; anything else is `null`.
impl<T: Serialize> Serialize for Setting<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.get().serialize(serializer)
    }
}

/// Accepts any scalar: YAML reads `1`, `true` and `1e3` as numbers and booleans, not as text.
struct AnyScalar<T>(PhantomData<T>);

impl<'de, T> Visitor<'de> for AnyScalar<T>
where
    T: FromStr,
    T::Err: fmt::Display,
{
    type Value = Setting<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Setting::read(text))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Setting::read(if value { "true" } else { "false" }))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(Setting::read(&value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Setting::read(&value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Setting::read(&value.to_string()))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Setting::Unset)
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(Setting::Unset)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        while sequence.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Setting::misplaced("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Setting::misplaced("a map"))
    }
}

/// For `deserialize_with`: `field: null`, and `field:` without a value, count as absent.
pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn read(json: &str) -> Setting<IpAddr> {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn absent_null_and_empty_are_the_same() {
        assert_eq!(read("null"), Setting::Unset);
        assert_eq!(read("\"\""), Setting::Unset);
    }

    #[test]
    fn what_cannot_be_understood_is_kept_as_written() {
        assert_eq!(&*read("\"100.64.30\"").bad().unwrap().value, "100.64.30");
        assert_eq!(&*read("7").bad().unwrap().value, "7");
        assert_eq!(&*read("true").bad().unwrap().value, "true");
        assert_eq!(&*read("[1, {}]").bad().unwrap().value, "a list");
        assert_eq!(&*read("{\"a\": [1]}").bad().unwrap().value, "a map");
    }
}
